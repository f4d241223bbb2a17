"""The worker on its event loop: streams from their specification to their events."""
