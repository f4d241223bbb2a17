"""`mlxd top`: a live view of the server. Figures and frames are pure; `command` has the effects."""
