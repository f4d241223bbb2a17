"""Tests of `mlxd_worker.proof`."""
