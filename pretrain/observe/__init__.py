"""Observe training steps: the audit of products, checks, measurements and the profile."""
