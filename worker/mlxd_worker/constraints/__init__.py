"""Response formats: from a request's text to a compiled constraint. Neither MLX nor gRPC."""
