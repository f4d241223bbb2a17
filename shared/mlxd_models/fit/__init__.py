"""What a load needs, as a sum with a name per term, and the best way to live that fits. Pure."""
