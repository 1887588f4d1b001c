"""What a run would be: checks, counts, memory and time, before anything costs any."""
