"""The scheduler as a pure function: no clock, no I/O, no waiting. State and event in, actions out."""
