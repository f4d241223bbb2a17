"""Tests of the engine thread."""
