"""A deterministic simulation of the scheduler core: seeded worlds, faults, invariants, mutants."""
