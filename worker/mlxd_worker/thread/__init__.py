"""The engine thread: the only door to MLX, and what lives behind it."""
