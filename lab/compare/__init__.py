"""Comparisons of runs: matrices, reports, and the rules of a fair comparison."""
