"""What a user may say: the training recipe, the command line over it, the launch environment under it."""
