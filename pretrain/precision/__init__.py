"""In which precision a model trains: the formats, their quantizers, what multiplies in them, and what is seen of that."""
