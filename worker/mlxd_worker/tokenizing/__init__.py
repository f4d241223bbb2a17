"""Text to tokens and back, for whoever asks: bounded in time, in memory and in how much at once."""
