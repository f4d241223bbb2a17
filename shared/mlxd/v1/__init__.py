"""Generated protobuf and gRPC stubs of mlxd.v1; made by `make proto`, never edited."""
