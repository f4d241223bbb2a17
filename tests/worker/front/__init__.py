"""Tests of the worker as its event loop sees it."""
