"""A model's files: where they are, what their headers say, and the model's identity."""
