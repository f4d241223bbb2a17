"""Tests of what the controller counts, and how it is scraped."""
