"""Tests of a worker's process."""
