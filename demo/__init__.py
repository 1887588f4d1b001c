"""`make demo`: from the text that every machine has to a small trained language model."""
