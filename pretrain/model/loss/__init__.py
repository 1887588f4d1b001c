"""The LM head as the loss: in chunks, so that all logits never exist at once."""
