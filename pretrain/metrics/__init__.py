"""Records of a run: its folder, times, FLOPs, health, console output and trackers."""
