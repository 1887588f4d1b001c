"""Checkpoints that are complete or absent, and that any number of processes can load."""
