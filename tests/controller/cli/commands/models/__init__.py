"""Tests of commands on models."""
