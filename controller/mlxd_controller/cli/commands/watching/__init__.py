"""Commands that tell how a server and its workers are."""
