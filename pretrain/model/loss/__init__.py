"""The LM head and its loss, computed in chunks so that all logits never exist at the same time."""
