"""Reranking as Cohere's and Jina's clients ask for it."""
