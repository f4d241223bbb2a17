"""Tests of the worker's parts, each alone."""
