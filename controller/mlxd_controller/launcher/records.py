"""What the launcher leaves beside a worker's socket for a later controller.

A record is written atomically. What is read is not trusted: only a regular file of this user, of at
most RECORD_BYTES_MAX, whose every field has its type, is a record; anything else never causes an
action on a process.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from mlxd_controller.runtime.ports import Holding
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.ops.known_process import ProcessMark
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.convert import load_from_json, load_to_json
from mlxd_shared.wire.proof import Proof

FORMAT = 1
"""The record's format; others are not read."""
PID_MAX = (1 << 31) - 1
SUFFIXES = ("sock", "out", "json", "new")
"""A worker's files: its socket, its output, its record, and the record while it is written."""
_log = get_logger("launcher")

Json: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Record:
    """One worker: its process and incarnation, and what it holds ready, if anything.

    `arguments` are those with which its controller started all workers; `proof` is what the worker
    gave that controller, None before it listens or if it is of an older version.
    """

    mark: ProcessMark
    incarnation: str
    holding: Holding | None = None
    arguments: tuple[str, ...] = ()
    proof: Proof | None = None


class WorkerFiles:
    """The files of one worker in a run directory, all with one stem."""

    def __init__(self, folder: Path, stem: str) -> None:
        paths = (folder / f"{stem}.{suffix}" for suffix in SUFFIXES)
        self.socket, self.output, self._record, self._new = paths
        self._written: Record | None = None

    @property
    def address(self) -> str:
        """The address for gRPC."""
        return f"unix:{self.socket}"

    def write(self, record: Record) -> None:
        """Replace the record; a failure, such as a full disk, is only logged.

        Blocks for as long as writing a small file takes.
        """
        if record == self._written:
            return
        text = json.dumps(_fields(record))
        try:
            fd = os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
            self._new.replace(self._record)
        except OSError as error:
            _log.warning("worker cannot be recorded", pid=record.mark.pid, reason=error.strerror)
            return
        self._written = record

    def holds(self, holding: Holding | None, proof: Proof | None) -> None:
        """Record what the worker now holds and its proof; requires an earlier `write`."""
        if self._written is not None:
            self.write(replace(self._written, holding=holding, proof=proof))

    def read(self) -> Record | None:
        """Return the record; None if there is none that can be trusted."""
        try:
            fd = os.open(self._record, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            plain = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not plain or status.st_size > config.RECORD_BYTES_MAX:
                return None
            text = file.read(config.RECORD_BYTES_MAX + 1)
        self._written = parse_record(text)
        return self._written

    def remove(self) -> None:
        """Remove all files; idempotent."""
        for path in (self._record, self._new, self.socket, self.output):
            path.unlink(missing_ok=True)


def _fields(record: Record) -> Json:
    holding = record.holding
    return {
        "format": FORMAT,
        "pid": record.mark.pid,
        "start": record.mark.start,
        "incarnation": record.incarnation,
        "arguments": list(record.arguments),
        "proof": None if record.proof is None else record.proof.secret,
        "holding": None if holding is None else {
            "digest": holding.digest,
            "name": holding.name,
            "path": holding.path,
            "load_s": min(float(holding.load_s), config.LOAD_TOTAL_TIMEOUT_S),
            "options": load_to_json(holding.spec),
        },
    }  # fmt: skip


def parse_record(text: bytes) -> Record | None:
    """Return the record in `text`; None if it is not one."""
    if len(text) > config.RECORD_BYTES_MAX:
        return None
    try:
        fields = json.loads(text)
        json.dumps(fields, ensure_ascii=False).encode()  # raises for half a surrogate pair
        match fields:
            case {
                "format": form,
                "pid": int(pid),
                "start": str(start),
                "incarnation": str(incarnation),
                "arguments": [*words],
                **rest,
            } if form == FORMAT and type(pid) is int and 0 <= pid <= PID_MAX:
                return Record(
                    ProcessMark(pid, start),
                    incarnation,
                    None if rest.get("holding") is None else _holding(rest["holding"]),
                    tuple(_text(word) for word in words),
                    None if rest.get("proof") is None else Proof(_text(rest["proof"])),
                )
    except (ValueError, RecursionError, MlxdError):
        pass
    return None


def _holding(fields: object) -> Holding:
    match fields:
        case {
            "digest": str(digest),
            "name": str(name),
            "path": str(path),
            "load_s": float(load_s),
            "options": dict(options),
        } if 0 <= load_s <= config.LOAD_TOTAL_TIMEOUT_S:  # also false for NaN
            return Holding(digest, name, path, load_from_json(options), load_s)
    raise ValueError(fields)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)  # noqa: TRY004 - one exception for whatever is no record
    return value
