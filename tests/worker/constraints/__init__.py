"""Constraints: formats read, compiled, and followed token by token."""
