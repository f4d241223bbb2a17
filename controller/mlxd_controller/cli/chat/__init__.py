"""Chats at a terminal: what has been said, what is typed, commands, tools, and what is kept."""
