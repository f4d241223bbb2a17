"""Tests of chats: templates, control tokens, parsers."""
