"""Servers that nobody waits for: detached from a terminal, or kept by the system's own manager."""
