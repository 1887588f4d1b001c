"""What a run measures and writes: its folder, times, FLOPs, the health of its loss, and what the console and trackers show."""
