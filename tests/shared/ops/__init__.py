"""Tests of logs and terminals."""
