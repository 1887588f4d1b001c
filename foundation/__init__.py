"""Building blocks that `packing` and `pretrain` share. This package imports neither of them.

It provides an exception whose message includes a remedy, files that survive a crash, file locks and
hashes, readers for YAML and JSON, typed settings, command lines, signals, progress bars, formatted
numbers, tables, and temporary overrides of attributes.
"""
