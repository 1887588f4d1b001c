"""The precisions, one file each. Each file defines a `Precision` object, named PRECISION."""
