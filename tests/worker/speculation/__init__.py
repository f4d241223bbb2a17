"""Guessing: what is proposed, how deep, and that nothing but speed changes."""
