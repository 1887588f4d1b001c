"""The training engine. Packages import one way, from `precision` to `run`."""
