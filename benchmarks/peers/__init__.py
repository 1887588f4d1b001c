"""Other trainers, measured as their own programs (`python -m benchmarks.peers`)."""
