"""Decoder layers fused into few kernels, exact against the unfused model; each kernel is tested against a form in torch."""
