"""`python -m mlxd_controller` is the command `mlxd`."""

from __future__ import annotations

from mlxd_controller.cli import main

if __name__ == "__main__":
    main()
