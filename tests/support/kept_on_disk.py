"""Tiny engines whose prompts outlive them: blocks of few tokens in a folder of the test's own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mlxd_shared.blocks.block_file import Block
from mlxd_shared.blocks.chain import Form, name_of_form
from mlxd_shared.blocks.folder import BlockFolder, open_folder
from mlxd_shared.blocks.sealing import DiskKey
from mlxd_shared.blocks.store import BlockStore
from mlxd_worker.cache.base import Kind, LayerCache
from mlxd_worker.cache.disk.prefixes import PrefixDisk
from mlxd_worker.cache.disk.shapes import BlockShapes, describe_layers
from mlxd_worker.cache.disk.tier import IN_FLIGHT_NBYTES, BlockTier
from mlxd_worker.cache.rows import RowCaches
from tests.bench.models import Shape
from tests.support.engines import TinyEngine, tiny_engine
from tests.support.remembering import AMPLE

OpenFiles = Callable[[Path, bytes], BlockFolder]
BLOCK_TOKENS = 16
FLUSH_S = 60.0
SLOW = Shape(hidden=256, layers=4, heads=4, kv_heads=1, mlp=1024, context=1024)
"""A model that takes much longer to compute a block of 256 tokens than any disk to read it."""

STEP_S = 100.0
"""What each look at an engine's clock takes here: so computing is slow, and any disk is fast."""


class SettledTier(BlockTier):
    """What is handed over is written when the call returns, so that no choice depends on a race."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.gentle: list[bool] = []
        """Of each block: whether it was to be written with pauses."""

    def write(self, block: Block, *, gently: bool = False) -> None:
        """Hand a block over and wait until the thread has written it."""
        self.gentle.append(gently)
        super().write(block, gently=gently)
        assert self.flush(timeout_s=FLUSH_S)


def slow_clock() -> Callable[[], float]:
    """Return a clock on which everything takes long."""
    ticks = itertools.count(1)
    return lambda: next(ticks) * STEP_S


def shapes_of(caches: RowCaches) -> BlockShapes:
    """Return what blocks of these caches look like."""
    layers: dict[Kind, list[LayerCache]] = {}
    for layer in caches.layers:
        if layer is not None:
            layers.setdefault(layer.kind, []).append(layer)
    return BlockShapes(layers, block_tokens=BLOCK_TOKENS)


def make_disk(
    folder: Path,
    caches: RowCaches,
    *,
    digest: str = "d" * 64,
    budget_nbytes: int = AMPLE,
    in_flight_nbytes: int = IN_FLIGHT_NBYTES,
    check: Callable[[Block], None] | None = None,
    clock: Callable[[], float] | None = None,
    open_files: OpenFiles = open_folder,
    key: DiskKey | None = None,
    make_tier: type[BlockTier] = BlockTier,
) -> PrefixDisk:
    """Return what keeps blocks of `caches`' prompts in a folder.

    check: called for each block that is read, on the reading thread. clock: the tier's. open_files:
    opens the folder of a form, such as one that takes nothing. key: what blocks are encrypted with.
    """
    shapes = shapes_of(caches)
    form = Form(digest, "F32", 512, "cpu", "mlx", describe_layers(caches.layers), BLOCK_TOKENS)

    def check_both(block: Block) -> None:
        if check is not None:
            check(block)
        shapes.check(block)

    if key is not None:
        open_files = partial(open_folder, key=key)
    form_name = name_of_form(form, name_key=b"" if key is None else key.name_key)
    store = BlockStore(
        open_files(folder, form_name),
        form_name,
        budget_nbytes=budget_nbytes,
        file_nbytes_max=1 << 24,
        check=check_both,
        clock=time.time,
    )
    options: dict[str, Any] = {} if clock is None else {"clock": clock}
    return PrefixDisk(make_tier(store, in_flight_nbytes=in_flight_nbytes, **options), shapes)


@contextmanager
def engine_with_disk(
    model: Path,
    folder: Path,
    *,
    disk_options: dict[str, Any] | None = None,
    save: bool = False,
    **options: Any,
) -> Iterator[TinyEngine]:
    """Give an engine on `model` that keeps blocks in `folder`; as if killed at the end.

    What it has handed over by then is written. save: it is unloaded in good order instead.
    """
    options = {"prefix_nbytes": AMPLE, "chunk": 64, "clock": slow_clock(), **options}
    tiny = tiny_engine(
        model, make_disk=lambda caches: make_disk(folder, caches, **(disk_options or {})), **options
    )
    disk = disk_of(tiny)
    try:
        yield tiny
        if save:
            disk.save(timeout_s=FLUSH_S)
        assert disk.tier.flush(timeout_s=FLUSH_S)
        tiny.prefix.shrink(0)
        assert tiny.caches.contents.book.live == 0
    finally:
        disk.tier.close(timeout_s=FLUSH_S)


def disk_of(tiny: TinyEngine) -> PrefixDisk:
    """Return what keeps an engine's blocks."""
    disk = tiny.prefix.disk
    assert disk is not None
    return disk
