"""Other trainers as their own programs (`python -m benchmarks.speed programs`)."""
