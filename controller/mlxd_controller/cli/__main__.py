"""`python -m mlxd_controller.cli` is `mlxd`, for systems without the script on PATH."""

from mlxd_controller.cli import main

if __name__ == "__main__":
    main()
