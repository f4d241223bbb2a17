"""Plugins of pytest that tests/conftest.py switches on."""
