"""Tables for people and JSON for programs; the same values in both.

On a terminal a table fits its width; elsewhere lines are as long as they need and carry no colour.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import typer

from mlxd.answers import PositionLogprobs, TokenLogprob
from mlxd.messages import FitReport, Model, WorkerStatus
from mlxd_controller.cli.terminal.tables import lay_out
from mlxd_shared.domain.figures import ModelState
from mlxd_shared.domain.requests import KVFormat
from mlxd_shared.domain.units import format_bytes, format_duration
from mlxd_shared.ops.terminal import escape

DIGEST_CHARS = 12
_CLEAR = "\x1b[2J\x1b[H"
_CLEAR_LINE = "\r\x1b[K"
_OF_EVERY_LINE = frozenset({"component", "incarnation", "timestamp"})
_HIGH_CONTROLS = re.compile(r"[\x7f-\x9f]")
_KV_TEXT = {
    KVFormat.MODEL: "as the model computes",
    KVFormat.Q8: "in 8 bits",
    KVFormat.Q4: "in 4 bits",
}


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    spare: Sequence[str] = (),
    wide: bool = False,
) -> None:
    """Print rows under upper-case headings; see `lay_out`, whose `right` and `spare` these are.

    wide: whether lines may be longer than the terminal's, so that no column is left out.
    """
    cells = ([escape(cell) for cell in row] for row in rows)
    width = None if wide else _width()
    headings, *lines = lay_out(columns, cells, width=width, right=right, spare=spare, shortens=True)
    if os.environ.get("TERM") != "dumb":
        headings = typer.style(headings, bold=True)  # which is gone where nobody sees it
    typer.echo("\n".join([headings, *lines]))


def fields(pairs: Iterable[tuple[str, str]]) -> None:
    """Print one `name  value` line each, values aligned; pairs without a value are left out."""
    cells = [(escape(name), escape(value)) for name, value in pairs if value]
    if cells:
        _, *lines = lay_out(("name", "value"), cells, width=_width())
        typer.echo("\n".join(lines))


def clear_screen() -> None:
    """Empty the terminal; elsewhere, nothing."""
    if sys.stdout.isatty():
        typer.echo(_CLEAR, nl=False)


def step(text: str, *, quiet: bool = False) -> None:
    """Say on a terminal what is at work, in place of what was said before; "" takes it away."""
    if not quiet and sys.stderr.isatty():
        typer.echo(f"{_CLEAR_LINE}{text}", nl=False, err=True)


def _width() -> int | None:
    """Return how wide a line may be; None where nobody sees it."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def json_line(value: object) -> None:
    """Print `value` (a message, or anything JSON can carry) as one line of JSON."""
    text = json.dumps(value, ensure_ascii=False, default=_encode)
    # JSON leaves these as they are, of which one alone begins a sequence that steers a terminal.
    typer.echo(_HIGH_CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def answer(text: str, value: object, *, as_json: bool) -> None:
    """Print one line: `text` for people, or what it says as JSON for programs."""
    if as_json:
        json_line(value)
    else:
        typer.echo(text)


def _encode(value: object) -> object:
    match value:
        case enum.Enum():
            return value.value
        case dt.datetime():
            return value.isoformat()
        case bytes():
            return list(value)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def logprobs(positions: Iterable[PositionLogprobs]) -> str:
    """Return a line for each token: its log-probability, its text, and the best ones in brackets.

    Bytes that are no whole text are shown as bytes.
    """
    return "".join(f"{_token(each.chosen)}{_best(each.top)}\n" for each in positions)


def _token(token: TokenLogprob) -> str:
    shown: str | bytes = token.text_bytes
    with suppress(UnicodeDecodeError):
        shown = token.text_bytes.decode()
    return f"{token.logprob:8.4f} {shown!r}"


def _best(top: Sequence[TokenLogprob]) -> str:
    return f"  [{', '.join(_token(token).strip() for token in top)}]" if top else ""


def log_line(line: str, *, timed: bool = False) -> str:
    """Return a line of a program's output for people: of a structured one what happened, and why.

    Of a traceback, the last line says that. `timed` begins it with its time.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        return line
    time = f"{fields.get('timestamp', '')} ".lstrip() if timed else ""
    fields = {name: value for name, value in fields.items() if name not in _OF_EVERY_LINE}
    event, level = fields.pop("event"), fields.pop("level", "info")
    if isinstance(fields.get("exception"), str):
        fields["exception"] = fields["exception"].strip().rpartition("\n")[2]
    said = ", ".join(f"{name} {value}" for name, value in fields.items())
    return f"{time}{level}: {event}" + (f" ({said})" if said else "")


def short(digest: str) -> str:
    """Return the abbreviated digest."""
    return digest.removeprefix("sha256:")[:DIGEST_CHARS]


def place(model: Model) -> str:
    """Return a model's path, behind the machine that has it where that is not the server's own."""
    return f"{model.machine}:{model.path}" if model.machine else model.path


def until(model: Model, now: dt.datetime) -> str:
    """Return when `model` will be unloaded, from `now`."""
    if model.state is not ModelState.READY:
        return "-"
    if model.expire_time is None:
        return "pinned" if model.pinned else "for ever"
    left_s = (model.expire_time - now).total_seconds()
    return f"in {format_duration(left_s)}" if left_s > 0 else "now"


def form(held: FitReport | Model | WorkerStatus) -> str:
    """Return how a model lives in memory; a server that does not say keeps KV as it computes."""
    return (
        f"weights {held.weights.value}, keys and values"
        f" {_KV_TEXT[held.kv_format or KVFormat.MODEL]},"
        f" prefix cache {format_bytes(held.prefix_cache_nbytes)}"
    )


def state(model: Model) -> str:
    """Return the state, with how far a load is."""
    if model.state is ModelState.LOADING and model.progress.bytes_total:
        return f"loading {model.progress.bytes_read / model.progress.bytes_total:.0%}"
    return model.state.value
