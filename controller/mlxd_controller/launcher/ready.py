"""The one line that a worker writes on its ready pipe: where it listens, or why it cannot."""

from __future__ import annotations

import json
from dataclasses import dataclass

from mlxd_shared.domain.errors import BackendProblem, MlxdError, WorkerStartFailed
from mlxd_shared.wire.proof import Proof


@dataclass(frozen=True, slots=True)
class ReadyLine:
    """A worker that listens."""

    address: str
    pid: int
    incarnation: str
    version: str
    proof: Proof | None = None
    """By what it takes a request as checked."""


def parse_ready_line(line: bytes, *, model: str) -> ReadyLine:
    """Return what the line says. `model` is for messages.

    Raises:
        BackendProblem: the worker told why it cannot serve on this machine.
        WorkerStartFailed: the line is not what a worker writes.
    """
    try:
        fields = json.loads(line)
        secret = fields.get("proof") if isinstance(fields, dict) else None
        proof = None if secret is None else Proof(str(secret))
    except (ValueError, RecursionError) as error:
        raise _unreadable(model) from error
    if not isinstance(fields, dict):
        raise _unreadable(model)
    problem = fields.get("error")
    if isinstance(problem, str):
        raise BackendProblem(problem)
    address, pid, incarnation, version = (
        fields.get(key) for key in ("address", "pid", "incarnation", "version")
    )
    if (
        isinstance(address, str)
        and isinstance(pid, int)
        and isinstance(incarnation, str)
        and isinstance(version, str)
    ):
        return ReadyLine(address, pid, incarnation, version, proof)
    raise _unreadable(model)


def _unreadable(model: str) -> MlxdError:
    return WorkerStartFailed(model, ("the ready line was not what a worker writes",))
