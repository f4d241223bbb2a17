"""The worker as its event loop sees it: streams from their specification to their events."""
