"""`make demo`: from text that every machine has to a small trained language model."""
