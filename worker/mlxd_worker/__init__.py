"""The worker: one model, its caches, its decode loop, and an account of every byte they pin."""
