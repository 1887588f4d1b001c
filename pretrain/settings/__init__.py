"""Settings of a training: the recipe, the command line, and the launch environment."""
