"""The ways to obtain worker processes, one per file."""
