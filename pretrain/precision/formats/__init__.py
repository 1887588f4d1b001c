"""The precisions. Each file with a quantized precision defines a `Precision` called PRECISION.

`unquantized` defines FP32 and BF16. `definition` contains the class `Precision`.
"""
