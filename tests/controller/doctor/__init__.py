"""Tests of `mlxd_controller.doctor`."""
