"""Work whose cost nobody can tell beforehand, done in child processes that can be killed."""
