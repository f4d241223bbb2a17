"""Tests of what the page is served and fed with."""
