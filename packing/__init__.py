"""Text to packs to batches: all that happens between a document on disk and the tensors of a training step."""
