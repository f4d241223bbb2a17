"""Tests of value types and errors."""
