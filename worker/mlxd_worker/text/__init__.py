"""Text to tokens and back: tokenizers, spelling, control tokens, and what makes one hostile."""
