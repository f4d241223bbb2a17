"""Families that keep latents in place of keys and values."""
