"""The proof of the engine on the machine at hand: `python -m mlxd_worker.proof` (decision 0073)."""
