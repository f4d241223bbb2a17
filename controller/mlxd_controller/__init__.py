"""The controller: decides which models are resident, keeps a worker for each, relays streams."""
