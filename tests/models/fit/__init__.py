"""Tests of what a load needs, and of the best way to live that fits."""
