"""The configuration file: what its keys are, how it is read, and where each value comes from."""
