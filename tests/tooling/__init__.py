"""Tests of the tree itself: its style, its tools, its packages."""
