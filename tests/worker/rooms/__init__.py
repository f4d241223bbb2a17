"""Tests of turns and of what asks children."""
