"""Where a model lives and who makes room for it. Pure."""
