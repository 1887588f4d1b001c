"""In which precision a model trains: the registry, what the launch environment asks for, how modules compute in it, and proof."""
