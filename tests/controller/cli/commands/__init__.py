"""Tests of single commands, in the rooms of the commands."""
