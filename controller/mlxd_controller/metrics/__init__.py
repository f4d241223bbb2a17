"""The controller's metrics, and how Prometheus reads them."""
