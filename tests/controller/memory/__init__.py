"""Tests of what memory there is."""
