"""Blocks of prompts on disk: their names, their files, the folder that keeps them. Without MLX."""
