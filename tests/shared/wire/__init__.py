"""Tests of the wire's edge."""
