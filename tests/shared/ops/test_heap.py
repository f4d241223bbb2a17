"""What is freed below a live block of the C heap goes back to the system."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pytest

from mlxd_shared.ops.heap import keep_heap_trimmed
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


class _Over(Exception):
    """The story is over."""


@dataclass
class _Process:
    """A process whose processor time goes as a story has it, in seconds; notes its trims."""

    story_s: list[float]
    trimmed_at: list[int] = field(default_factory=list)

    def used_s(self) -> float:
        """Return the next figure of the story."""
        if not self.story_s:
            raise _Over
        return self.story_s.pop(0)

    def trim(self) -> None:
        """Note how much of the story was left."""
        self.trimmed_at.append(len(self.story_s))


@pytest.mark.parametrize(
    ("story_s", "trims"),
    [
        pytest.param([1.0, 1.2, 1.4], [], id="it hardly worked"),
        pytest.param([1.0, 1.2, 1.5, 1.5, 1.9], [2], id="little adds up, and is done with"),
        pytest.param([1.0, 9.0, 9.1, 9.1, 9.6, 9.6], [4, 1], id="each time that it worked"),
    ],
)
@pytest.mark.asyncio
async def test_a_process_that_has_worked_is_trimmed(story_s: list[float], trims: list[int]) -> None:
    """What counts is the work since the last trim, which is work itself."""
    process = _Process(story_s)
    with pytest.raises(_Over):
        await keep_heap_trimmed(used_s=process.used_s, trim=process.trim, every_s=0)
    assert process.trimmed_at == trims


@pytest.mark.asyncio
async def test_a_busy_process_is_trimmed_once_it_rests() -> None:
    """While it is not idle it is left alone, however long it works."""
    process = _Process([1.0, 5.0, 9.0, 9.0, 9.0])
    idle = iter([False, False, True])
    with pytest.raises(_Over):
        await keep_heap_trimmed(
            idle=lambda: next(idle), used_s=process.used_s, trim=process.trim, every_s=0
        )
    assert process.trimmed_at == [1]


# Threads that have freed large blocks, smallest first: glibc takes each size for one to keep.
THREADS = """
import ctypes, json, psutil, sys, threading
from mlxd_shared.ops.heap import bound_heap, trim_heap

libc, process = ctypes.CDLL(None), psutil.Process()
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
if {bounded}:
    bound_heap()

def work():
    for size in (1 << 21, 1 << 23, 24 << 20):
        for _ in range(2):
            address = libc.malloc(ctypes.c_size_t(size))
            ctypes.memset(address, 1, size)
            libc.free(address)
    done.wait()
    over.wait()

done, over = threading.Barrier(5), threading.Event()
threads = [threading.Thread(target=work) for _ in range(4)]
before = process.memory_info().rss
for thread in threads:
    thread.start()
done.wait()
trim_heap()
print(json.dumps(process.memory_info().rss - before))
over.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps such memory")
@pytest.mark.parametrize("bounded", [True, False])
def test_threads_keep_no_large_blocks_that_are_free(*, bounded: bool) -> None:
    """A trim alone leaves the free end of each thread's heap; the control shows it."""
    kept = run(THREADS.replace("{bounded}", str(bounded)), environment())
    assert kept < 16 << 20 if bounded else kept > 48 << 20
