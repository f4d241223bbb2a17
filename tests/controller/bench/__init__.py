"""Tests of `mlxd_controller.bench`."""
