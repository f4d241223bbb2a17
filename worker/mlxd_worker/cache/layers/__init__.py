"""The caches of layers, by what they remember: every position, a window, a latent, a state."""
