"""What a worker's environment says beside the controller's: libraries, and how malloc keeps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mlxd_controller.launcher.environment import worker_environment
from mlxd_shared import config
from tests.worker.fresh_process import environment, run

# Threads that have read a long text, and wait for the next: none ends, nor its heap with it.
READERS = """
import ctypes, json, psutil, threading
from mlxd_shared.ops.heap import trim_heap

libc, process = ctypes.CDLL(None), psutil.Process()
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
SIZE, COUNT, THREADS = 1 << 20, 20, 6
together, over = threading.Barrier(THREADS + 1), threading.Event()

def read():
    blocks = []
    for _ in range(COUNT):
        blocks.append(libc.malloc(ctypes.c_size_t(SIZE)))
        ctypes.memset(blocks[-1], 1, SIZE)
    for address in blocks:
        libc.free(address)
    together.wait()
    over.wait()

before = process.memory_info().rss
threads = [threading.Thread(target=read) for _ in range(THREADS)]
for thread in threads:
    thread.start()
together.wait()
trim_heap()
print(json.dumps(process.memory_info().rss - before))
over.set()
"""


def test_libraries_of_wheels_come_first(tmp_path: Path) -> None:
    """BLAS and CUDA folders that exist go before what the variable held; the rest stays."""
    for folder in ("scipy_openblas32/lib", "nvidia/cublas/lib", "mlx_cuda_13.libs", "other/lib"):
        (tmp_path / folder).mkdir(parents=True)
    base = {"LD_LIBRARY_PATH": "/opt/lib", "HOME": "/nowhere"}

    environment = worker_environment(base, site=tmp_path, platform="linux")

    assert environment["LD_LIBRARY_PATH"].split(os.pathsep) == [
        str(tmp_path / "scipy_openblas32/lib"),
        str(tmp_path / "nvidia/cublas/lib"),
        str(tmp_path / "mlx_cuda_13.libs"),
        "/opt/lib",
    ]
    assert environment["HOME"] == "/nowhere"
    mac = worker_environment({}, site=tmp_path, platform="darwin")
    assert "DYLD_LIBRARY_PATH" in mac


def test_workers_ask_for_large_pages_and_mappings(tmp_path: Path) -> None:
    """glibc is told so, beside what an operator tells it; who has decided about it is obeyed."""

    def tunables(base: dict[str, str], platform: str = "linux") -> str | None:
        environment = worker_environment(base, site=tmp_path, platform=platform)
        return environment.get("GLIBC_TUNABLES")

    own = (
        "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8388608"
        ":glibc.malloc.trim_threshold=33554432:glibc.malloc.arena_max=2"
    )
    assert tunables({}) == own
    assert tunables({"GLIBC_TUNABLES": "glibc.malloc.perturb=1"}) == f"glibc.malloc.perturb=1:{own}"
    decided = own.replace("=", "=1")
    assert tunables({"GLIBC_TUNABLES": decided}) == decided
    assert tunables({}, "darwin") is None


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps such memory")
@pytest.mark.parametrize("bounded", [True, False])
def test_a_workers_threads_together_keep_no_more_than_one(tmp_path: Path, *, bounded: bool) -> None:
    """What each heap may keep at its end is kept once; the control has a heap for each thread."""
    base = environment(GLIBC_TUNABLES="" if bounded else "glibc.malloc.arena_max=16")
    kept = run(READERS, worker_environment(base, site=tmp_path, platform="linux"))
    allowed = config.KEPT_HEAP_NBYTES + (8 << 20)
    assert kept < allowed if bounded else kept > 2 * allowed


def test_idle_blas_threads_sleep_soon(tmp_path: Path) -> None:
    """A preloaded OpenBLAS reads it before the worker can say so; the operator's word wins."""

    def spin(base: dict[str, str], platform: str = "linux") -> str | None:
        environment = worker_environment(base, site=tmp_path, platform=platform)
        return environment.get(config.BLAS_SPIN_VARIABLE)

    assert spin({}) == spin({config.BLAS_SPIN_VARIABLE: ""}) == config.BLAS_SPIN_CYCLES_LOG2
    assert spin({config.BLAS_SPIN_VARIABLE: "26"}) == "26"
    assert spin({}, "darwin") is None
