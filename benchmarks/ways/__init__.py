"""Ways to train the same model on the same packs, one small module each, and the loop that they share."""
