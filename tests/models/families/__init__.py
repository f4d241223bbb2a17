"""Descriptions of families: every key of a config is taken, or refused by name."""
