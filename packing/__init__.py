"""Text to packs to batches: from documents on the disk to the tensors of a training step."""
