"""Tests of work in child processes that can be killed."""
