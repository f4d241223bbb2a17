"""mlx-lm's own HTTP server, with our BLAS under it or with the one that its wheel brings.

BLAS (ours or shipped), then the server's own options.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys


def main() -> None:
    """Put the BLAS in place and become the server."""
    blas, *options = sys.argv[1:]
    if blas == "ours":
        # The same OpenBLAS, without our kernels in front.
        alone = {**os.environ, "MLXD_PRODUCTS": "off"}
        importlib.import_module("mlxd_worker.machine.blas").preload_blas(alone)
    sys.argv = ["mlx_lm", "server", *options]
    runpy.run_module("mlx_lm", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
