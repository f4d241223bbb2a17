"""Tests of the ledger and of what loads take."""
