"""Caches with a row axis: many rows of different lengths side by side, each starting at position 0."""
