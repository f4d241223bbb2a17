"""Tests of commands that tell how a server is."""
