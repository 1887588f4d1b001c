"""Compare a run with two references: plain transformers, and quantizers written in NumPy."""
