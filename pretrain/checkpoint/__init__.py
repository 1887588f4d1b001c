"""Checkpoints of a run. They are never incomplete, and any number of processes can load them."""
