"""Plan a run from settings, shapes and counts: checks, sizes, memory and time."""
