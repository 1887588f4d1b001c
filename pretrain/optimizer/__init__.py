"""AdamW for FP32, BF16 and exact BF16 weights, and the schedule of the learning rate."""
