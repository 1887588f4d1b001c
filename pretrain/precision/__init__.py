"""In which precision a model trains: the registry of recipes, what the launch environment asks for, and how modules compute in it."""
