"""The LM head and its loss, in chunks so that all logits never exist at once."""
