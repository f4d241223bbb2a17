"""What several test folders share: small models and real processes."""
