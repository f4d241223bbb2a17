"""Records of workers: what is written is read back; what is not a record is nothing at all."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxd_controller.launcher.records import Record, WorkerFiles, parse_record
from mlxd_controller.runtime.ports import Holding
from mlxd_shared import config
from mlxd_shared.domain.requests import KVFormat, LoadSpec, SamplingOptions, Weights
from mlxd_shared.ops.known_process import ProcessMark
from mlxd_shared.wire.proof import Proof

STEM = "0123abcd-1"
SPEC = LoadSpec(
    context_length=4096,
    rows_max=3,
    weights=Weights.FLOAT32,
    sampling=SamplingOptions(temperature=0.5, seed=1 << 63, logit_bias=((3, -1.5),)),
    keep_alive_s=90.0,
    pinned=True,
    priority=-2,
    kv_format=KVFormat.Q8,
    prefix_cache_nbytes=1 << 20,
)
HOLDING = Holding("d" * 64, "mé", "/m", SPEC, 2.0)
PROOF = Proof.make()
RECORD = Record(ProcessMark(4711, "boot:1"), "ab-1", HOLDING, arguments=("--a", "é"), proof=PROOF)


def fields_of(record: Record, folder: Path) -> dict[str, Any]:
    """Return what is in the file of a record."""
    WorkerFiles(folder, STEM).write(record)
    fields: dict[str, Any] = json.loads((folder / f"{STEM}.json").read_text())
    return fields


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every field, with a model and a proof and without; nobody else may read it."""
    for record in (RECORD, replace(RECORD, holding=None), replace(RECORD, proof=None)):
        WorkerFiles(tmp_path, STEM).write(record)
        assert WorkerFiles(tmp_path, STEM).read() == record
    assert (tmp_path / f"{STEM}.json").stat().st_mode & 0o777 == 0o600


def test_what_a_worker_holds_changes_in_its_record(tmp_path: Path) -> None:
    """Each change replaces the whole; remove() leaves nothing, whatever there was."""
    files = WorkerFiles(tmp_path, STEM)
    files.holds(RECORD.holding, PROOF)  # nothing is known of it yet
    assert files.read() is None
    files.write(replace(RECORD, holding=None, proof=None))
    files.holds(RECORD.holding, PROOF)
    assert WorkerFiles(tmp_path, STEM).read() == RECORD
    files.holds(None, PROOF)
    assert WorkerFiles(tmp_path, STEM).read() == replace(RECORD, holding=None)
    os.mkfifo(files.output)
    files.socket.touch()
    files.remove()
    files.remove()
    assert not list(tmp_path.iterdir())


def test_a_record_of_an_older_version_has_no_proof(tmp_path: Path) -> None:
    """Nor does a record show the secret of one that has: not where it is printed."""
    fields = fields_of(RECORD, tmp_path)
    del fields["proof"]
    assert parse_record(json.dumps(fields).encode()) == replace(RECORD, proof=None)
    assert PROOF.secret not in repr(RECORD)


def test_a_disk_that_takes_nothing_stops_no_worker(tmp_path: Path) -> None:
    """What cannot be written is logged, and there is no record."""
    files = WorkerFiles(tmp_path / "missing", STEM)
    files.write(RECORD)
    assert files.read() is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"format": 1}',
        b'{"format": 1, "pid": ' + b"9" * 5000 + b"}",
    ],
)
def test_garbage_is_no_record(text: bytes) -> None:
    """Whatever bytes there are, they are a record or nothing."""
    assert parse_record(text) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", 2),
        ("pid", True),
        ("pid", "4711"),
        ("pid", -1),
        ("pid", 1 << 40),
        ("start", 1),
        ("incarnation", None),
        ("incarnation", "\ud800"),
        ("arguments", None),
        ("arguments", "--a"),
        ("arguments", ["--a", 1]),
        ("arguments", ["\ud800"]),
        ("proof", 1),
        ("proof", ""),
        ("proof", "F" * 64),
        ("holding", "a model"),
        ("holding", {}),
        ("load_s", float("nan")),
        ("load_s", -1.0),
        ("load_s", 1e9),
        ("options", []),
        ("options", {"contextLength": 1}),
        ("options", {"unheardOf": 1}),
    ],
)
def test_a_wrong_field_makes_it_none(name: str, value: object, tmp_path: Path) -> None:
    """One field of another type or out of range, and nothing of the record is believed."""
    fields = fields_of(RECORD, tmp_path)
    (fields["holding"] if name in ("load_s", "options") else fields)[name] = value
    assert parse_record(json.dumps(fields).encode()) is None


def test_only_a_plain_file_of_a_bounded_size_is_read(tmp_path: Path) -> None:
    """A link, a pipe and a file that is too large are no records, and nothing waits for them."""
    path, files = tmp_path / f"{STEM}.json", WorkerFiles(tmp_path, STEM)
    text = json.dumps(fields_of(RECORD, tmp_path))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert files.read() is None
    path.unlink()
    os.mkfifo(path)
    assert files.read() is None
    path.unlink()
    path.write_text(text + " " * (config.RECORD_BYTES_MAX - len(text)))
    assert files.read() == RECORD
    path.write_text(text + " " * (config.RECORD_BYTES_MAX - len(text) + 1))
    assert files.read() is None
