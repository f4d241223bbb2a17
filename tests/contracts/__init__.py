"""One suite a seam, run over the real thing and its fake: what passes for both is the contract."""
