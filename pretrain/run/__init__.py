"""The parts of a training run: job, packs, model, resume, evaluation, saving, and commands."""
