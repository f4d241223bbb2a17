"""Figures of one model: what `mlxd bench` starts, asks, times and shows."""
