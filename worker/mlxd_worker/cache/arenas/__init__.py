"""Which row sits where: arenas by capacity, their slots, and a pass's index arrays."""
