"""Every other model that sees: mlx-vlm's models over our caches."""
