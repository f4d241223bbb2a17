"""Attacks on a server that is this test's own, over loopback, and what they do to others."""
