"""One file for each family of architectures, and what only some of them have."""
