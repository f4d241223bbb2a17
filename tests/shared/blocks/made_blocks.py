"""Blocks that tests write: small, each different, and chained as a prompt's are."""

from __future__ import annotations

import io
import os
import random
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mlxd_shared.blocks.block_file import Block, BlockRefused, Fault, Part, Tensor
from mlxd_shared.blocks.chain import Form, name_of_form, names_of
from mlxd_shared.blocks.folder import BlockFolder, open_folder
from mlxd_shared.blocks.index import Entry
from mlxd_shared.blocks.listing import LOCK_FILE
from mlxd_shared.blocks.sealing import DiskKey
from mlxd_shared.blocks.store import BlockStore

BLOCK_TOKENS = 4
FORM = Form("d" * 64, "F32", 512, "cpu", "mlx 1", ("standard F32[1, 2, 4, 8]",), BLOCK_TOKENS)
FORM_NAME = name_of_form(FORM)
FILE_NBYTES_MAX = 1 << 20
AMPLE = 1 << 30


class RefusingFolder(BlockFolder):
    """A folder, of nobody's, of which the system says that no file can be written."""

    def __init__(self, path: Path, fault: int, *, go_on: threading.Event | None = None) -> None:
        """Open an existing folder; go_on: what each write waits for before it fails."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        super().__init__(path, os.open(path, flags), os.open(path / LOCK_FILE, flags))
        self._fault = fault
        self._go_on = go_on

    def write(self, entry: Entry, pieces: Iterable[bytes | memoryview]) -> None:
        """Fail."""
        del entry, pieces
        assert self._go_on is None or self._go_on.wait(60.0)
        raise OSError(self._fault, os.strerror(self._fault))


def refuse(root: Path, form_name: bytes, fault: int, **options: Any) -> RefusingFolder:
    """Return a form's folder in `root`, which takes no files."""
    folder = open_folder(root, form_name)
    folder.close()
    return RefusingFolder(folder.path, fault, **options)


def name_key_of(key: DiskKey | None) -> bytes:
    """Return what names are made under where blocks are encrypted with `key`, if with any."""
    return b"" if key is None else key.name_key


def form_name_of(key: DiskKey | None) -> bytes:
    """Return the name of `FORM` under a key."""
    return name_of_form(FORM, name_key=name_key_of(key))


def chain_of(seed: int, count: int, *, values: int = 16, key: DiskKey | None = None) -> list[Block]:
    """Return the first blocks of a prompt, the same for one seed; as named under `key`."""
    draws = random.Random(seed)
    tokens = draws.randbytes(4 * BLOCK_TOKENS * count)
    form_name, name_key = form_name_of(key), name_key_of(key)
    names = names_of(form_name, tokens, block_tokens=BLOCK_TOKENS, name_key=name_key)
    blocks = []
    for depth in range(count):
        own = tokens[16 * depth : 16 * (depth + 1)]
        tensors = (
            Tensor("standard.0.0", "F32", (1, 2, 2, values), draws.randbytes(16 * values)),
            Tensor("standard.0.1", "BF16", (values,), draws.randbytes(2 * values)),
            Tensor("quantized.0.0", "U32", (1,), draws.randbytes(4)),
        )
        before = names[depth - 1] if depth else form_name
        blocks.append(Block(form_name, before, own, depth, Part.ENTRIES, tensors, name_key))
    return blocks


def open_blocks(
    folder: Path,
    *,
    budget_nbytes: int | None = AMPLE,
    clock: Callable[[], float] = lambda: 1_000_000.0,
    check: Callable[[Block], None] = lambda _: None,
    key: DiskKey | None = None,
) -> BlockStore:
    """Return the store of `FORM` in a folder; encrypted with `key`."""
    form_name = form_name_of(key)
    return BlockStore(
        open_folder(folder, form_name, key=key),
        form_name,
        budget_nbytes=budget_nbytes,
        file_nbytes_max=FILE_NBYTES_MAX,
        check=check,
        clock=clock,
    )


def files_in(folder: Path) -> list[Path]:
    """Return the block files of all forms in a folder, by name."""
    kinds = ("safetensors", "sealed")
    return sorted(path for kind in kinds for path in folder.glob(f"v*/*.{kind}"))


def filling(raw: bytes) -> Callable[[memoryview], None]:
    """Return what gives bytes out of `raw`, in order, as a file does that is read."""
    file = io.BytesIO(raw)

    def fill(room: memoryview) -> None:
        if file.readinto(room) != len(room):
            raise BlockRefused(Fault.TORN, "short")

    return fill


def contents_of(block: Block | None) -> dict[str, bytes]:
    """Return a block's bytes by tensor; empty for none."""
    tensors = () if block is None else block.tensors
    return {tensor.name: bytes(tensor.content) for tensor in tensors}
