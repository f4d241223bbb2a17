"""Constraints at work: matchers on threads of their own, and masks for each draw."""
