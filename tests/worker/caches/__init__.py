"""Every kind of cache under one contract, against a reference that keeps the whole history."""
