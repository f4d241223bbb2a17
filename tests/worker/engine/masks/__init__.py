"""Tests of constraints at work."""
