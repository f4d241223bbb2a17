"""Tests of texts that become tokens, and tokens that become text."""
