"""`mlxd doctor`: what this machine lacks, and whether the engine computes rightly and fast."""
