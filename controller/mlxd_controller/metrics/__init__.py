"""What the controller counts, as Prometheus reads it."""
