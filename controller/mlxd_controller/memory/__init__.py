"""Available memory: the host's, each GPU's, and processes that the kernel killed for lack of it."""
