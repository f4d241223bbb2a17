"""Inputs that nobody meant: seeded, for a fixed time a target, with the same rules for each."""
