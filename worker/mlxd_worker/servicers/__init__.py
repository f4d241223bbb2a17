"""The worker's gRPC services: thin, each method converts, asks the worker, and converts back."""
