"""Frames of `mlxd top`: within any terminal, with all that has room, and no broken word."""

from __future__ import annotations

import itertools

import pytest
from rich.cells import cell_len

from mlxd.messages import Model, Status
from mlxd_controller.cli.top.choices import Choices
from mlxd_controller.cli.top.figures import ModelLine, View, view_of
from mlxd_controller.cli.top.frame import ASCII, SIZE_MIN, Blocks, Place, bar, draw
from mlxd_shared.domain.figures import MemoryAccount, ModelState
from mlxd_shared.wire.records import read
from tests.fakes import replies

MIB = replies.MIB
ACCOUNTS = tuple(
    MemoryAccount(name, size * MIB)
    for name, size in (("weights", 700), ("kv", 120), ("prefix", 0), ("workspace", 3))
)
NAMES = ("demo", "org/" + "x" * 50, "二" * 30, "bad\x1b[2J")

UNTOUCHED = Choices()


def lines(count: int = 4) -> tuple[ModelLine, ...]:
    """So many models in memory."""
    return tuple(
        ModelLine(
            f"{NAMES[number % 4]}{number // 4 or ''}",
            ModelState.READY if number % 4 else ModelState.LOADING,
            None if number % 4 else 0.5,
            12.5 * number,
            number,
            2,
            0.01 * 10**number if number < 4 else None,
            number * MIB,
            "gpu:0",
            ACCOUNTS,
        )
        for number in range(count)
    )


def view(count: int = 4) -> View:
    """A server with one device and so many models."""
    status = read(Status, replies.status())
    made = view_of(status, [read(Model, replies.model())], [])
    return View(made.version, 90.0, made.devices, lines(count), 8 << 30, 3 << 30)


def frame(columns: int, height: int, *, models: int = 4, choices: Choices = UNTOUCHED) -> list[str]:
    """The texts of a frame's lines."""
    place = Place(columns, height, "127.0.0.1:8555")
    return [line.plain for line in draw(view(models), choices, place)]


@pytest.mark.parametrize("models", [0, 1, 4, 60])
def test_a_frame_fits_every_terminal(models: int) -> None:
    """Neither a line too many nor a cell too wide, and nothing that steers, at any size."""
    choices = (Choices(), Choices(confirming=NAMES[1]), Choices(note="n" * 300))
    for columns, height in itertools.product((1, 20, 40, 41, 60, 79, 80, 200), (1, 8, 9, 15, 24)):
        for chosen in choices:
            shown = frame(columns, height, models=models, choices=chosen)
            assert len(shown) <= height, (columns, height)
            assert max(map(cell_len, shown)) <= columns, (columns, height, shown)
            assert not any("\x1b" in line for line in shown)


def test_a_frame_at_80x24_has_everything() -> None:
    """Models, states, speeds, queues, first-token times, bars by device and by account, keys."""
    shown = frame(80, 24)
    whole = "\n".join(shown)

    assert len(shown) == 24
    assert shown[0].startswith("mlxd 9.8.7  127.0.0.1:8555  up 1m30s")
    for word in ("MODEL", "STATE", "TOK/S", "WAIT", "FIRST", "12.5", "loading 50%", "100 ms"):
        assert word in whole
    assert "0 B held, 12.0 MiB promised of 4.0 GiB" in whole
    assert "5.0 GiB in use of 8.0 GiB" in whole
    assert [line.split()[0] for line in shown if "█" in line and "MiB" in line] == [
        "weights", "kv", "workspace",
    ]  # fmt: skip
    assert shown[-1].startswith("q quit  s sorted by name  u unload")


def test_a_frame_at_60x15_leaves_whole_columns_out() -> None:
    """The chosen model, the speed and the queue stay."""
    shown = frame(60, 15, choices=Choices(chosen=NAMES[2]))
    headings = next(line for line in shown if "MODEL" in line).split()

    assert headings == ["MODEL", "STATE", "TOK/S", "WAIT", "FIRST", "MEMORY"]
    assert sum(line.startswith("> 二") for line in shown) == 1


def test_the_chosen_model_is_among_those_shown() -> None:
    """However many there are, and wherever it is."""
    names = [line.name for line in sorted(lines(60), key=lambda line: line.name)]
    for name in (names[0], names[30], names[59]):
        shown = frame(80, 15, models=60, choices=Choices(chosen=name))
        assert sum(line.startswith("> ") for line in shown) == 1
        assert f"{names.index(name) + 1} of 60" in shown[-1]


def test_a_terminal_too_small_is_told_so() -> None:
    """In one line, in place of half a frame."""
    assert frame(SIZE_MIN[0] - 1, 24) == ["too small: 40x8 is needed"]
    assert frame(9, 3) == ["too …eded"]


def test_a_server_that_is_lost_is_said_first() -> None:
    """The last figures stay."""
    place = Place(80, 24, "127.0.0.1:8555", lost="no server there")
    shown = [line.plain for line in draw(view(), Choices(), place)]
    assert shown[0] == "127.0.0.1:8555 does not answer (no server there); trying again"
    assert any("loading 50%" in line for line in shown)


def test_why_a_server_is_lost_steers_no_terminal() -> None:
    """The reason is a server's text: in one line of the terminal's width, whatever it holds."""
    place = Place(40, 8, "127.0.0.1:8555", lost="\x1b[2J\nbad " * 9)
    head = draw(view(), Choices(), place)[0].plain
    assert head.isprintable()
    assert cell_len(head) <= 40


def test_why_a_model_failed_is_said_when_it_is_chosen() -> None:
    """In one line, whatever its text."""
    failed = ModelLine("a", ModelState.FAILED, None, None, 0, 0, None, 0, "", error="it\n died")
    shown = draw(View(models=(failed,)), Choices(), Place(80, 24, "x"))
    assert shown[-2].plain == "it died"


@pytest.mark.parametrize(
    ("parts", "drawn"),
    [
        ((0.5, 0.25), "####==.."), ((0.0, 0.0), "........"), ((0.001, 0.0), "#......."),
        ((2.0, 1.0), "########"), ((0.99, 0.5), "########"), ((-1.0, 0.5), "====...."),
    ],
)  # fmt: skip
def test_a_bar_is_as_full_as_what_it_shows(parts: tuple[float, ...], drawn: str) -> None:
    """What is there is seen, however little; what is beyond the whole ends at it."""
    assert bar(parts, 8, ASCII) == drawn
    assert bar(parts, 0, Blocks()) == ""
