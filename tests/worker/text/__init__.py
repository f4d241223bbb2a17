"""Tests of tokenizers and spelling."""
