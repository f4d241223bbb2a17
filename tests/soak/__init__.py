"""The long tests, run by `make soak`: every kill offset, many streams, long fuzzing."""
