"""The rules for agents."""
