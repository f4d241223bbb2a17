"""Families most of whose layers are recurrent."""
