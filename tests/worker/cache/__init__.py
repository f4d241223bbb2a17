"""Tests of caches: rows, layers, snapshots, prefixes."""
