"""Fakes of the outside world, each verified by a test of the real thing."""
