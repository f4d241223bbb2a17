"""Images of requests: from the bytes of their files to the pixels that a model sees."""
