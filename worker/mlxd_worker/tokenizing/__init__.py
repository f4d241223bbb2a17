"""Text to tokens and back, bounded in time, in memory and in concurrency."""
