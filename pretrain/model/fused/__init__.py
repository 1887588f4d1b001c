"""Decoder layers that are computed by a few fused kernels. Tests compare them with plain torch."""
