"""Tests of one model over several ranks."""
