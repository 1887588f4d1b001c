"""Fused decoder layers in a few kernels, compared with the unfused model and with plain torch."""
