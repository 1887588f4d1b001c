"""Ways to train a model on the same packs, one module each, and their common training loop."""
