"""Tests of reranking."""
