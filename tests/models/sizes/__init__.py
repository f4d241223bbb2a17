"""Tests of what a model takes."""
