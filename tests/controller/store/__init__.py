"""Tests of where models come from."""
