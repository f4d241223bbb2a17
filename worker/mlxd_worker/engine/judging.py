"""A step's tokens judged together, of rows where nothing but an end is to be looked for.

Invariants:
- A token is judged as `Row.take` would judge it. What is left to that has not changed.
- Such a row costs no call but its text's, its event's and its sink's: on a GPU a step of many rows
  waits for what the host does for each of them (decision 0083).
- A stream's first token and its last one are never among these.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mlxd_shared.domain.errors import InternalError, MlxdError
from mlxd_shared.ops.logs import get_logger
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.request import Failed, Submit, Tokens
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.stepping.base import Run

_log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of a step's runs."""

    moved: Collection[RowId]
    """The rows that have their tokens now; those of `failed` among them."""
    left: list[Run]
    """The runs that have to be judged one by one."""
    failed: list[tuple[Row, Exception]]
    """The rows whose tokens have no text, and why."""


def judge_plainly(runs: Sequence[Run], caches: RowCaches, now_s: float) -> Judged:
    """Tell the streams of plain rows what was drawn for them, and bring these to where they stand.

    Whatever a text's decoder raises concerns its row alone.
    """
    left: list[Run] = []
    failed: list[tuple[Row, Exception]] = []
    offsets: dict[RowId, int] = {}
    for run in runs:
        row, token_id = run.row, run.drawn[0].token_id
        output = row.output
        offset = len(output)
        if (
            not row.plain
            or run.drafted
            or row.first_token_s is None
            or token_id < 0
            or token_id in row.ends
            or offset + 1 >= row.most
        ):
            left.append(run)
            continue
        row.next_draw = None
        row.pending = token_id
        row.last_token_s = now_s
        row.offset = offsets[row.id] = run.start + 1
        output.append(token_id)
        try:
            text = row.text.write(token_id)
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row alone
            failed.append((row, error))
        else:
            row.request.sink.put(Tokens(offset, (token_id,), text))
    caches.contents.cut_back_each(offsets)
    return Judged(offsets.keys(), left, failed)


def failure_of(request: Submit, error: Exception) -> Failed:
    """Return what one stream's client is told; a bug goes into the log under an id."""
    if isinstance(error, MlxdError):
        return Failed(error)
    error_id = uuid.uuid4().hex[:12]
    _log.error("a row failed", stream=request.stream, error_id=error_id, exc_info=error)
    return Failed(InternalError(error_id))
