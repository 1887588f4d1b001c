"""Settings of a run: the recipe, the command line, and the launch environment."""
