"""What a model is, from its files alone. Never imports MLX."""
