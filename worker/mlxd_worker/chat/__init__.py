"""Chats: a conversation becomes a prompt by the model's template, and an answer typed parts."""
