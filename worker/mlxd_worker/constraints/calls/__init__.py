"""Grammars of calls of tools, by the dialect that a model writes them in."""
