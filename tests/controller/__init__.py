"""Tests of mlxd_controller."""
