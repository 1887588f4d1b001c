"""Plan a run before it starts: check its settings, and estimate its FLOPs, memory and time."""
