"""The training engine. Packages import one way, from `precision` to `run`."""

__version__ = "0.3.0"
