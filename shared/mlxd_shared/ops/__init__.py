"""Logs, metrics, terminals and processes of others."""
