"""Where every byte of the worker goes: the ledger of live arrays and the plan of how weights live."""
