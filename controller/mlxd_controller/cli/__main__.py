"""`python -m mlxd_controller.cli` is `mlxd`, for where the script is not on PATH."""

from mlxd_controller.cli import main

if __name__ == "__main__":
    main()
