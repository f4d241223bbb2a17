"""Every field of the wire is exercised, or refused by name: the walk, the probes, the proof."""
