"""Start trainings: Accelerate configurations, their environment, and processes."""
