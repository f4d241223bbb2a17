"""Engines in processes of their own, to be timed by `mlxd bench`: ours, and that of mlx-lm."""
