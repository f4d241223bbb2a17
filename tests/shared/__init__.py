"""Tests of what controller and worker share."""
