"""Ollama's API: its requests, what they ask of a model, and how its answers are written."""
