"""Addresses, sockets, TLS and tokens."""
