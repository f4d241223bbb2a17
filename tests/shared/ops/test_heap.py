"""What is freed below a live block of the C heap goes back to the system."""

from __future__ import annotations

import sys

import pytest

from tests.worker.fresh_process import environment, run

# Blocks too small to be mapped on their own lie in the heap, and the last one pins the rest.
PROGRAM = """
import ctypes, json, psutil
from mlxd_shared.ops.heap import trim_heap

libc, process = ctypes.CDLL(None), psutil.Process()
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
SIZE = 100_000

def block():
    address = libc.malloc(ctypes.c_size_t(SIZE))
    ctypes.memset(address, 1, SIZE)
    return address

blocks = [block() for _ in range(1000)]
last = block()
for address in blocks:
    libc.free(address)
freed = process.memory_info().rss
trim_heap()
print(json.dumps([freed, process.memory_info().rss]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps such memory")
def test_freed_memory_below_a_live_block_is_given_back() -> None:
    """The process shrinks by what was freed, though a later block is still in use."""
    freed, trimmed = run(PROGRAM, environment())
    assert freed - trimmed > 90_000_000
