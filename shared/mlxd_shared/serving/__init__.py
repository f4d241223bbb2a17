"""What every gRPC server of mlxd has."""
