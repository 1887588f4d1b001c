"""What a run measures: FLOPs from shapes, peaks of devices, and where the figures go."""
