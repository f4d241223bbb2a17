"""Tests of the step loop."""
