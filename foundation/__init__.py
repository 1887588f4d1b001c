"""The foundation of `packing` and `pretrain`, which knows nothing of either.

It has errors with a remedy, files that survive a crash, file locks and hashes, YAML and JSON, typed
settings, command lines, signals, progress bars, units, tables, and temporary overrides of
attributes.
"""
