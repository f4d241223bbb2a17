"""Commands that send a model text and print what comes back."""
