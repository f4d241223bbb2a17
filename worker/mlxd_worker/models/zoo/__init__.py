"""Every other architecture: mlx-lm's models over our caches."""
