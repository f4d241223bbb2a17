"""The folder of all models' blocks: what is believed of files that nobody has written like that."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mlxd_shared.blocks.about import BLOCK_ASSUMED_S, NOBODY, decode_about
from mlxd_shared.blocks.root import RootFolder
from tests.shared.blocks.made_blocks import chain_of, files_in, open_blocks


def fill(folder: Path, blocks: int) -> str:
    """Leave blocks of one form; return its folder's name."""
    store = open_blocks(folder)
    assert all(store.write(block) for block in chain_of(1, blocks))
    store.close()
    (form,) = [path.name for path in folder.glob("v*")]
    return form


def test_a_check_ends_when_nobody_wants_it(tmp_path: Path) -> None:
    """Whoever asked may leave: what has not been read by then is left as it is."""
    form = fill(tmp_path / "prefixes", 3)
    root = RootFolder(tmp_path / "prefixes")
    answers = iter([False, True])
    assert root.verify(form, until=lambda: next(answers)).sound == 1
    assert root.verify(form).sound == 3
    root.close()


@pytest.mark.parametrize("stated", [str(10**400), "1e400", "-1", "0", "NaN", "7200", '"1"'])
def test_a_saving_that_nobody_measured_is_not_believed(stated: str) -> None:
    """Whatever a folder says of itself is an account, and never an end of who reads it."""
    about = decode_about(f'{{"model": "m", "block_s": {stated}}}'.encode())
    assert about.block_s == BLOCK_ASSUMED_S
    assert about.model == "m"
    assert decode_about(b"[" * 20_000) == NOBODY


def test_a_file_from_the_future_was_used_now(tmp_path: Path) -> None:
    """A time that no calendar has is in no account."""
    form = fill(tmp_path / "prefixes", 2)
    os.utime(files_in(tmp_path / "prefixes")[0], (1 << 33, 1 << 33))
    root = RootFolder(tmp_path / "prefixes")
    assert root.survey(form).last_s <= time.time()
    assert root.survey(form, clock=lambda: 5.0).last_s == 5.0
    root.close()
