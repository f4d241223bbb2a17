"""Answers told apart into text, reasoning and calls: one file a family, found in `registry`."""
