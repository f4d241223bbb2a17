"""One model over several devices: a process a rank, led by the first."""
