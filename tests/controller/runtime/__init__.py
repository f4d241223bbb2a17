"""Tests of the owner of the scheduler's state, and of links to workers."""
