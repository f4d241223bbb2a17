"""Tests of what a worker answers, as its servicers put it."""
