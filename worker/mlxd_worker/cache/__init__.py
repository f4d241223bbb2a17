"""Caches with a row axis: rows of different lengths side by side, each from position 0."""
