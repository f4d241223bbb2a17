"""What controller and worker share: value types, errors, the wire's edge. Never imports MLX."""
