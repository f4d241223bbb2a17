"""The public face of mlxd in Python: the typed client and the generated stubs of mlxd.v1."""
