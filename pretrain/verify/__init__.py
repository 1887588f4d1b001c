"""Compare a run with references: plain transformers and a reference quantizer."""
