"""Runs beside each other: matrices, reports, and whether a comparison is fair."""
