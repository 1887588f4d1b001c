"""The engine of the launcher, one concern a module; imports run one way, from `precision` to `train_accelerate.py`."""
