"""What a model takes, from its sizes alone. Pure."""
