"""Recipes of the measured losses, and their dataset of Python sources."""
