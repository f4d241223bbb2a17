"""A step's tokens judged together, of rows where nothing but an end is to be looked for.

Invariants:
- A token is judged as `Row.take` would judge it. What is left to that has not changed.
- Such a row costs no call but the first that its sink hears of: on a GPU a step of many rows waits
  for what the host does for each of them (decisions 0083, 0116). Its text is written when its sink
  asks what the stream is owed, of all tokens since then, and before anything else is told.
- A stream's first token and its last one are never among these.
- A stream whose text cannot be written is told what was written, and then so, once; its row is
  broken and tells nothing more. Where its sink has asked at once it goes at once, else with its
  client or at its last token: when the outbox asks is of this process alone, so that nothing of a
  step may follow from it (ranks follow steps).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from mlxd_shared import config
from mlxd_shared.domain.errors import InternalError, MlxdError
from mlxd_shared.ops.logs import get_logger
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.request import Event, Failed, Submit, Tokens
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.stepping.base import Run

_log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of a step's runs."""

    moved: Collection[RowId]
    """The rows that have their tokens now."""
    left: list[Run]
    """The runs that have to be judged one by one."""
    broken: list[Row]
    """The rows whose sinks have asked at once, and whose texts could not be written."""


def judge_plainly(runs: Sequence[Run], caches: RowCaches, now_s: float) -> Judged:
    """Owe the streams of plain rows what was drawn for them, and bring the rows to behind it."""
    left: list[Run] = []
    broken: list[Row] = []
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
        if row.reported_count == offset and not row.broken:  # else the sink knows already
            row.request.sink.owe(partial(tell, row))
            if row.broken:
                broken.append(row)
    caches.contents.cut_back_each(offsets)
    return Judged(offsets.keys(), left, broken)


def tell(row: Row) -> list[Event]:
    """Return what a row's stream has not been told yet, in events that are no larger than messages.

    Whatever its text's decoder raises concerns the row alone, which is broken then.
    """
    first, row.reported_count = row.reported_count, len(row.output)
    if row.broken:
        return []
    ids, texts = row.output[first:], list[str]()
    failure: list[Event] = []
    try:
        texts.extend(map(row.text.write, ids))  # those before one that fails stay
    except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row alone
        row.broken = True
        failure = [failure_of(row.request, error)]
    events: list[Event] = []
    for start in range(0, len(texts), config.EVENTS_PER_MESSAGE_MAX):
        stop = min(start + config.EVENTS_PER_MESSAGE_MAX, len(texts))
        text = "".join(texts[start:stop])
        events.append(Tokens(first + start, tuple(ids[start:stop]), text))
    return events + failure


def catch_up(row: Row) -> bool:
    """Tell a row's stream what it is owed, before anything else; False: the row is broken."""
    for event in tell(row):
        row.request.sink.put(event)
    return not row.broken


def fail(row: Row, error: MlxdError) -> None:
    """End a row's stream with an error, behind what it is owed; a broken one has had its end."""
    if catch_up(row):
        row.request.sink.put(Failed(error))


def judge_by(row: Row, act: Callable[[], Event]) -> Event:
    """Return what a row makes of its pass; where it cannot, how it has failed."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row alone
        return failure_of(row.request, error)


def failure_of(request: Submit, error: Exception) -> Failed:
    """Return what one stream's client is told; a bug goes into the log under an id."""
    if isinstance(error, MlxdError):
        return Failed(error)
    error_id = uuid.uuid4().hex[:12]
    _log.error("a row failed", stream=request.stream, error_id=error_id, exc_info=error)
    return Failed(InternalError(error_id))
