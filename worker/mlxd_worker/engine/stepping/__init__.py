"""How a step is evaluated: one pass, one ahead, or one compiled function."""
