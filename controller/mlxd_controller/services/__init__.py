"""The gRPC services of the controller. Protobuf comes in and goes out here."""
