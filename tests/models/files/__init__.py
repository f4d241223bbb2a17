"""Tests of a model's files."""
