"""Commands that serve, and that say who may ask: the controller, the gateway, the keys."""
