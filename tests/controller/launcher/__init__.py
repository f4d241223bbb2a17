"""Tests of how workers are started, attached, recorded and ended."""
