"""The precisions, one file each. A file defines a subclass of `Precision` and ends with its object, PRECISION."""
