"""A family that is nobody's, as CONTRIBUTING says that one is added."""
