"""Text to packs to batches: everything between a document on disk and the tensors a training step takes.

The package knows nothing of models and imports nothing else of this project.
"""
