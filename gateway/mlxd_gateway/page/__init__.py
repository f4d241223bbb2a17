"""The page: its files, and the JSON and events that it is fed with."""
