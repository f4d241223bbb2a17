"""Tests of commands that send a model text."""
