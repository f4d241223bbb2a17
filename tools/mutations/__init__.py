"""Mutation testing: one wrong line at a time, and whether the tests of its own room see it.

Run from the root of the tree: `PYTHONPATH=tools python -m mutations --help`.
"""
