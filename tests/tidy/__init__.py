"""The rules that tests/test_tidy.py holds the tree to. Each answers with its findings."""
