"""Tests of what all APIs of the gateway have in common."""
