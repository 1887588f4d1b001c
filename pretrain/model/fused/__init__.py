"""Decoder layers fused into few kernels, exact against the unfused model. Each kernel is tested against its form in torch."""
