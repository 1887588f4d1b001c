"""Run one training: its job and packs, assembly, resume, evaluation, saving, and its commands."""
