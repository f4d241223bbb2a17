"""Kernels of our own for CUDA, compiled by MLX when they are first used."""
