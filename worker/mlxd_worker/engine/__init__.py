"""The decode loop and what it needs. Knows neither the event loop nor the wire."""
