"""What a run really is: the audit of its products, and its first step beside plain transformers."""
