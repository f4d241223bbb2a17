"""Tests of blocks on disk: names, files, folders, and when they are worth it."""
