"""Tests of what a model is, from its files alone."""
