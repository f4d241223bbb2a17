"""What families of models are, from config.json and headers: typed config, tensors, footprint."""
