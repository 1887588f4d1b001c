"""The engine of the launcher, one concern a module; imports run downward from `settings` to `train_accelerate.py`."""
