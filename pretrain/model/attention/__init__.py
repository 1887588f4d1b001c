"""Packed attention: the kernels, and which of them a run takes."""
