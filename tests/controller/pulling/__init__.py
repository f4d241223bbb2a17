"""Tests of pulling models from a hub."""
