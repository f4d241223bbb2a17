"""A model's files: where they are, what their headers contain, and the model's identity."""
