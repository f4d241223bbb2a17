"""Tests of the HTTP gateway: its APIs over a scripted controller, and each part alone."""
