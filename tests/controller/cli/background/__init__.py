"""Tests of servers that nobody waits for."""
