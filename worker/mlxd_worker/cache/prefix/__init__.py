"""The prefix cache: former prompts in a trie, and what is evicted from it."""
