"""Model architectures: parsed configs, checked weights, and forward passes written for batches."""
