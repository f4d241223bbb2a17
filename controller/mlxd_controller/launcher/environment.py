"""The environment of a worker: the controller's own, with the wheels' libraries found first.

Large blocks of memory use large pages where the kernel grants them on request: a GiB of keys and
values is then ready after 0.2 to 0.4 s instead of 0.7 to 1.5 (decision 0021). They are separate
mappings, so that freed memory is returned at once.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from mlxd_shared import config

# Folders of shared libraries that wheels bring, relative to site-packages: BLAS, then CUDA.
LIBRARY_FOLDERS = (
    "scipy_openblas32/lib",
    "nvidia/*/lib",
    "nvidia/*/*/lib",
    "mlx_cuda*.libs",
    "mlx/lib",
)

ALLOCATOR_VARIABLE = "GLIBC_TUNABLES"
LARGE_PAGES = "glibc.malloc.hugetlb=1"
"""glibc requests transparent large pages for malloc's memory; other systems ignore this."""

OWN_MAPPINGS = f"glibc.malloc.mmap_threshold={config.OWN_MAPPING_NBYTES}"
"""Blocks of this size are separate mappings, returned as soon as they are freed. By default glibc
lets the threshold grow to 32 MiB, and keeps what lies between blocks (decision 0026)."""

KEPT_TOP = f"glibc.malloc.trim_threshold={config.KEPT_HEAP_NBYTES}"
"""How much free memory is kept at the heap's end. With a fixed mapping threshold glibc keeps only
128 KiB there, so that each step returns what the next one requests (decision 0041)."""

ARENAS = f"glibc.malloc.arena_max={config.WORKER_HEAPS_MAX}"
"""How many heaps the threads share. By default glibc makes eight per core, each of which keeps
`KEPT_TOP` at its end that no trim returns: a worker with two cores that had tokenised for 25 s kept
69 MiB in four of 16 heaps in which nothing was used."""


def worker_environment(base: Mapping[str, str], *, site: Path, platform: str) -> dict[str, str]:
    """Return `base` with the libraries of `site` in front, and settings of malloc and output."""
    variable = "DYLD_LIBRARY_PATH" if platform == "darwin" else "LD_LIBRARY_PATH"
    paths = (path for pattern in LIBRARY_FOLDERS for path in sorted(site.glob(pattern)))
    folders = [str(path) for path in paths if path.is_dir()]
    folders += filter(None, [base.get(variable)])
    changed = {"PYTHONUNBUFFERED": "1"}
    tunables = base.get(ALLOCATOR_VARIABLE, "")
    if platform == "linux":
        wanted = (LARGE_PAGES, OWN_MAPPINGS, KEPT_TOP, ARENAS)
        added = [each for each in wanted if each.partition("=")[0] not in tunables]
        changed[ALLOCATOR_VARIABLE] = ":".join(filter(None, [tunables, *added]))
    if folders:
        changed[variable] = os.pathsep.join(folders)
    return {**base, **changed}


def own_environment() -> dict[str, str]:
    """Return the environment for a worker of the running interpreter."""
    site = Path(sysconfig.get_path("platlib"))
    return worker_environment(os.environ, site=site, platform=sys.platform)
