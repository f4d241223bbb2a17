"""Conversations with the scheduler: events in, actions out."""
