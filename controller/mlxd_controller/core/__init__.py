"""The scheduler as a pure function: no clock, no I/O. State and event in, state and actions out."""
