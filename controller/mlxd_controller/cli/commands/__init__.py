"""The commands of `mlxd`, one module for each, or for a few of a kind."""
