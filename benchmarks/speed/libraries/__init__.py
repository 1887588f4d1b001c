"""Libraries of other trainers in our training loop (`python -m benchmarks.speed ways`)."""
