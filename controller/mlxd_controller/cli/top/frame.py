"""One frame of `mlxd top`: lines that fit a terminal of any size from SIZE_MIN on. Pure.

Invariants:
- A frame has at most as many lines as the terminal, and no line is wider. What has no room goes as
  a whole column, bar or line; a name alone is shortened, in its middle, with an ellipsis.
- Nothing that a server says steers the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from mlxd.messages import DeviceStatus
from mlxd_controller.cli.terminal.tables import GAP, lay_out, shorten
from mlxd_controller.cli.top.choices import Choices, chosen_name, order
from mlxd_controller.cli.top.figures import ModelLine, View
from mlxd_shared.domain.figures import ModelState
from mlxd_shared.domain.units import format_bytes, format_duration
from mlxd_shared.ops.terminal import escape_line

SIZE_MIN = (40, 8)
"""Columns and lines below which there is no room for figures."""
BAR_CELLS_MIN, BAR_CELLS_MAX = 8, 30
NAME_CELLS_MIN = 12
_MARK, _NO_MARK = "> ", "  "
_COLUMNS = ("model", "state", "tok/s", "run", "wait", "first", "memory", "device")
_RIGHT = ("tok/s", "run", "wait", "first", "memory")
_SPARE = ("device", "run", "memory", "first")
_STYLES = {
    ModelState.READY: "green",
    ModelState.FAILED: "red",
    ModelState.LOADING: "yellow",
    ModelState.QUEUED: "yellow",
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """The characters of a bar: held, promised beyond that, and free."""

    held: str = "█"
    promised: str = "▒"
    free: str = "░"


ASCII = Blocks("#", "=", ".")
"""For terminals without the others."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a frame is shown, and of which server. `lost` says why it does not answer, if so."""

    columns: int
    lines: int
    address: str
    lost: str = ""
    blocks: Blocks = Blocks()


def draw(view: View, choices: Choices, place: Place) -> list[Text]:
    """Return the lines of a frame, the keys last."""
    width, height = place.columns, place.lines
    if width < SIZE_MIN[0] or height < SIZE_MIN[1]:
        return [Text(shorten(f"too small: {SIZE_MIN[0]}x{SIZE_MIN[1]} is needed", width))]
    models = order(view.models, choices.sort)
    chosen = chosen_name(choices, [model.name for model in models])
    one = next((model for model in models if model.name == chosen), None)
    bars = _memory_bars(view, place)[: max(1, (height - 4) // 4)]
    room = height - 4 - len(bars)  # less head, headings of the models, message and keys
    accounts = _account_bars(one, place)[: room // 2] if one is not None else []
    table = _table(models, chosen, width, room - len(accounts))
    body = [_head(view, place), *bars, *table, *accounts][: height - 2]
    filling = [Text("")] * (height - 2 - len(body))
    return [*body, *filling, _message(choices, one, place), _keys(choices, models, chosen, width)]


def bar(parts: Sequence[float], cells: int, blocks: Blocks) -> str:
    """Return a bar of what is held and what is promised beyond it, each as a share of the whole."""
    characters, filled, share = "", 0, 0.0
    for part, character in zip(parts, (blocks.held, blocks.promised), strict=False):
        share = min(share + max(part, 0.0), 1.0)
        upto = round(share * cells)
        if part > 0 and upto == filled < cells:
            upto += 1  # what is there is seen, however little
        characters += character * (upto - filled)
        filled = max(upto, filled)
    return characters + blocks.free * (cells - filled)


def _head(view: View, place: Place) -> Text:
    if place.lost:
        words = f"{place.address} does not answer ({place.lost}); trying again"
        return Text(_first_that_fits([words], place.columns), style="bold red")
    name = f"mlxd {view.version}  {place.address}".rstrip()
    streams = sum(model.running + model.waiting for model in view.models)
    speed = sum(model.tokens_per_s or 0.0 for model in view.models)
    said = f"{_count(len(view.models), 'model')}, {_count(streams, 'stream')}, {speed:.1f} tokens/s"
    up = f"up {format_duration(view.up_s)}"
    words = _first_that_fits(
        [f"{name}  {up}  {said}", f"{name}  {said}", f"{place.address}  {said}", said, name],
        place.columns,
    )
    return Text(words, style="bold")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _first_that_fits(texts: Iterable[str], cells: int) -> str:
    last = ""
    for last in map(escape_line, texts):
        if cell_len(last) <= cells:
            return last
    return shorten(last, cells)


def _memory_bars(view: View, place: Place) -> list[Text]:
    rows = [(escape_line(device.name), *_device_bar(device)) for device in view.devices]
    if view.host_total_nbytes:
        used = view.host_total_nbytes - view.host_available_nbytes
        texts = [
            f"{format_bytes(used)} in use of {format_bytes(view.host_total_nbytes)}",
            format_bytes(used),
        ]
        rows.append(("host", (used / view.host_total_nbytes,), texts))
    return _bars(rows, place)


def _device_bar(device: DeviceStatus) -> tuple[tuple[float, ...], list[str]]:
    held, promised, budget = device.held_nbytes, device.reserved_nbytes, device.budget_nbytes
    state = ", lost" if device.lost else ", above its marks" if device.pressed else ""
    of = format_bytes(budget)
    texts = [
        f"{format_bytes(held)} held, {format_bytes(promised)} promised of {of}{state}",
        f"{format_bytes(held)} held of {of}{state}",
        format_bytes(held),
    ]
    whole = max(budget, 1)
    return (held / whole, max(promised - held, 0) / whole), texts


def _account_bars(model: ModelLine, place: Place) -> list[Text]:
    accounts = [account for account in model.accounts if account.nbytes]
    if not accounts:
        return []
    whole = sum(account.nbytes for account in accounts)
    rows = [
        (escape_line(each.name), (each.nbytes / whole,), [format_bytes(each.nbytes)])
        for each in sorted(accounts, key=lambda account: -account.nbytes)
    ]
    title = Text(shorten(f"memory of {escape_line(model.name)}", place.columns), style="bold")
    return [Text(""), title, *_bars(rows, place)]


def _bars(rows: Sequence[tuple[str, tuple[float, ...], list[str]]], place: Place) -> list[Text]:
    """Return a line each: label, bar, and the longest of its texts that leaves a bar its room."""
    label_cells = min(max((cell_len(label) for label, _, _ in rows), default=0), NAME_CELLS_MIN)
    lines, room = [], place.columns - label_cells - 4
    chosen = [
        next((t for t in texts if cell_len(t) + BAR_CELLS_MIN <= room), texts[-1])
        for _, _, texts in rows
    ]
    longest = max(map(cell_len, chosen), default=0)
    cells = max(min(room - longest, BAR_CELLS_MAX), 0)
    for (label, parts, _), text in zip(rows, chosen, strict=True):
        name = shorten(label, label_cells)
        line = Text(name + " " * (label_cells - cell_len(name) + 2))
        line.append(bar(parts, cells, place.blocks), style="cyan")
        line.append("  " + shorten(text, room))
        lines.append(line)
    return lines


def _table(models: Sequence[ModelLine], chosen: str, width: int, lines_max: int) -> list[Text]:
    """Return the headings, and as many models as there is room for, the chosen one among them."""
    if not models:
        return [Text(""), Text("no model is loaded")][: max(lines_max, 0) + 1]
    names = [model.name for model in models]
    place = names.index(chosen)
    begin = max(0, min(place - lines_max // 2, len(models) - lines_max))
    shown = models[begin : begin + max(lines_max, 1)]
    grid = [_cells(model) for model in shown]
    others = zip(_COLUMNS[1:], *(row[1:] for row in grid), strict=True)
    other_cells = sum(len(GAP) + max(map(cell_len, column)) for column in others)
    name_cells = max(NAME_CELLS_MIN, width - len(_MARK) - other_cells)
    headings, *rows = lay_out(
        _COLUMNS,
        [(shorten(name, name_cells), *cells) for name, *cells in grid],
        width=width - len(_MARK),
        right=_RIGHT,
        spare=_SPARE,
    )
    lines = [Text(shorten(_NO_MARK + headings, width), style="bold")]
    for model, row in zip(shown, rows, strict=False):
        is_chosen = model.name == chosen
        text = shorten((_MARK if is_chosen else _NO_MARK) + row, width)
        style = "reverse" if is_chosen else _STYLES.get(model.state, "")
        lines.append(Text(text, style=style))
    return lines


def _cells(model: ModelLine) -> tuple[str, ...]:
    fraction = model.loaded_fraction
    return (
        escape_line(model.name),
        model.state.value if fraction is None else f"loading {fraction:.0%}",
        "-" if model.tokens_per_s is None else f"{model.tokens_per_s:.1f}",
        str(model.running),
        str(model.waiting),
        _moment(model.first_token_s),
        format_bytes(model.held_nbytes) if model.held_nbytes else "-",
        escape_line(model.device) or "-",
    )


def _moment(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _message(choices: Choices, one: ModelLine | None, place: Place) -> Text:
    """Return the line above the keys: what has been done, or what is wrong with the model."""
    if choices.note:
        return Text(shorten(escape_line(choices.note), place.columns))
    error = one.error if one is not None and one.state is ModelState.FAILED else ""
    return Text(shorten(escape_line(" ".join(error.split())), place.columns), style="red")


def _keys(choices: Choices, models: Sequence[ModelLine], chosen: str, width: int) -> Text:
    if choices.confirming:
        ask = "unload {}?  y: yes, any other key: no"
        name = shorten(escape_line(choices.confirming), max(width - cell_len(ask) + 2, 1))
        return Text(shorten(ask.format(name), width), style="bold yellow")
    names = [model.name for model in models]
    keys = ["q quit", f"s sorted by {choices.sort.value}", "u unload", "up/down choose"]
    if names:
        keys.append(f"{names.index(chosen) + 1} of {len(names)}")
    while len(keys) > 1 and cell_len("  ".join(keys)) > width:
        keys.pop()
    return Text("  ".join(keys), style="dim")
