"""Commands on models: which there are and which are in memory, fetch, name, load and unload."""
