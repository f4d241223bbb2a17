"""How weights are stored, read, packed and multiplied with."""
