"""Tests of whole processes: servers, workers and clients as users start them."""
