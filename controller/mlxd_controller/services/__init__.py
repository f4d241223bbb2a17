"""The controller's gRPC services. Protobuf enters and leaves here."""
