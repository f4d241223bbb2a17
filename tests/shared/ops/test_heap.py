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
    """A process whose resident memory goes as a story has it, in MiB; notes when it is trimmed."""

    story_mib: list[int]
    trimmed_at: list[int] = field(default_factory=list)

    def resident(self) -> int:
        """Return the next figure of the story."""
        if not self.story_mib:
            raise _Over
        return self.story_mib.pop(0) << 20

    def trim(self) -> None:
        """Note how much of the story was left."""
        self.trimmed_at.append(len(self.story_mib))


@pytest.mark.parametrize(
    ("story_mib", "trims"),
    [
        pytest.param([100, 115, 110], [], id="too little growth"),
        pytest.param([100, 116, 101, 110], [2], id="what was freed"),
        pytest.param([100, 130, 130, 140, 145], [3], id="what is live is not tried again"),
        pytest.param([100, 130, 130, 146, 130], [3, 1], id="until there is as much more"),
        pytest.param([100, 80, 97, 81], [1], id="since it was smallest"),
    ],
)
@pytest.mark.asyncio
async def test_a_process_that_has_grown_is_trimmed(story_mib: list[int], trims: list[int]) -> None:
    """Growth is what the process has beyond its least since the last time."""
    process = _Process(story_mib)
    with pytest.raises(_Over):
        await keep_heap_trimmed(resident=process.resident, trim=process.trim, every_s=0)
    assert process.trimmed_at == trims


@pytest.mark.asyncio
async def test_a_busy_process_is_trimmed_once_it_rests() -> None:
    """While it is not idle it is left alone, however it grows."""
    process = _Process([100, 150, 200, 210, 110])
    idle = iter([False, False, True])
    with pytest.raises(_Over):
        await keep_heap_trimmed(
            idle=lambda: next(idle), resident=process.resident, trim=process.trim, every_s=0
        )
    assert process.trimmed_at == [1]
