"""Chats at a terminal: what is typed, commands, tools, and what is kept."""
