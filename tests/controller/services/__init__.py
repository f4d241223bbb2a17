"""Tests of the controller's services."""
