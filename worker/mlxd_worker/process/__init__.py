"""The process of a worker: its command line, its output, and what ends it."""
