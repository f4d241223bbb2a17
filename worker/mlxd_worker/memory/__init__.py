"""Where every byte of the worker goes: the ledger of live arrays and how the weights live."""
