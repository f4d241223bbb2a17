"""What a killed download leaves in the cache: removed once nobody writes it."""

from __future__ import annotations

import fcntl
from pathlib import Path

from mlxd_controller.pulling.leftovers import LOCKS, drop_leftovers

BLOBS = ("a" * 64, "b" * 64, "c" * 40)


def test_what_nobody_writes_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """A lock that somebody holds keeps a file; without one, or with a free one, it goes. What can
    be resumed, what is whole and what has another form stay."""
    folder, locks = tmp_path / "models--o--m", tmp_path / LOCKS / "models--o--m"
    blobs = folder / "blobs"
    blobs.mkdir(parents=True)
    locks.mkdir(parents=True)
    for blob in BLOBS[:2]:
        (locks / f"{blob}.lock").touch()
    for blob in BLOBS:
        (blobs / f"{blob}.0123abcd.incomplete").write_bytes(b"x")
    others = {BLOBS[0], f"{BLOBS[0]}.incomplete", f"{BLOBS[0]}.mlxd-unfinished", "x.y.incomplete"}
    for name in others:
        (blobs / name).write_bytes(b"x")

    with (locks / f"{BLOBS[0]}.lock").open("rb") as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)
        drop_leftovers(folder)
    left = {path.name for path in blobs.iterdir()}
    assert left == others | {f"{BLOBS[0]}.0123abcd.incomplete"}

    drop_leftovers(folder)
    assert {path.name for path in blobs.iterdir()} == others
    drop_leftovers(tmp_path / "none")
