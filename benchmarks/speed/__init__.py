"""Speed of trainers on one GPU (`python -m benchmarks.speed`)."""
