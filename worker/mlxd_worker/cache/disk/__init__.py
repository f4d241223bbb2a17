"""The prefix cache's blocks on disk: cut from snapshots, written and read beside the engine."""
