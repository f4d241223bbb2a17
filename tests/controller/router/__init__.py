"""Tests of the door for a router."""
