"""How worker processes come to be. One file a way."""
