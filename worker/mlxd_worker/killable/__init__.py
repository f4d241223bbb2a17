"""Work of unpredictable cost, done in child processes that can be killed."""
