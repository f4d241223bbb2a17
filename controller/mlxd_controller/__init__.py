"""The controller: decides which models are resident, runs a worker for each, relays streams."""
