"""Tests of the machine under MLX."""
