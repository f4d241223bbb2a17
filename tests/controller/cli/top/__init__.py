"""`mlxd top`: figures, frames, keys, and the whole command on a terminal."""
