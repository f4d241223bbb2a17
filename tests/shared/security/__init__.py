"""Tests of addresses, TLS and tokens."""
