"""Decoder layers fused into few kernels, exact against the unfused model; each kernel has a form in torch that it is tested by."""
