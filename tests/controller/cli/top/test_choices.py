"""Keys of `mlxd top`: what each does to the order and the choice, and what it asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd_controller.cli.top.choices import (
    Action,
    Choices,
    Sort,
    chosen_name,
    order,
    press,
    split_keys,
)
from mlxd_controller.cli.top.figures import ModelLine
from mlxd_shared.domain.figures import ModelState

NAMES = ("a", "b", "c")
LINE = ModelLine("a", ModelState.READY, None, 1.0, 0, 0, None, 5, "cpu")
LINES = (
    LINE,
    replace(LINE, name="b", tokens_per_s=9.0, waiting=2, held_nbytes=1),
    replace(LINE, name="c", tokens_per_s=None, waiting=1, held_nbytes=9),
)


def press_all(keys: str) -> tuple[Choices, Action | None]:
    """The choices after these keys, and what the last of them asks for."""
    choices = Choices()
    action: Action | None = None
    for key in split_keys(keys):
        choices, action = press(choices, key, NAMES)
    return choices, action


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ("", "a"), ("j", "b"), ("\x1b[B\x1b[B", "c"), ("jjjj", "c"), ("jk", "a"), ("kk", "a"),
        ("\x1bOB\x1bOA", "a"), ("j\x1b[5~x?", "b"),
    ],
)  # fmt: skip
def test_arrows_and_letters_choose(keys: str, name: str) -> None:
    """Neither end is passed; a key that means nothing changes nothing."""
    choices, action = press_all(keys)
    assert chosen_name(choices, NAMES) == name
    assert action is None


def test_a_model_that_has_gone_is_chosen_no_more() -> None:
    """The first one is; without any, none."""
    assert chosen_name(Choices(chosen="gone"), NAMES) == "a"
    assert chosen_name(Choices(chosen="gone"), ()) == ""
    assert press(Choices(), "u", ()) == (Choices(), None)
    assert press(Choices(), "j", ()) == (Choices(), None)


def test_an_order_follows_another() -> None:
    """And the first one comes again; what is largest stands first."""
    orders, choices = [], Choices()
    for _ in Sort:
        orders.append("".join(line.name for line in order(LINES, choices.sort)))
        choices, _ = press(choices, "s", NAMES)
    assert orders == ["abc", "bac", "cab", "bca"]
    assert choices.sort is Sort.NAME


def test_an_unload_is_confirmed() -> None:
    """By `y` alone: a slip of the finger unloads nothing."""
    asking, none = press_all("ju")
    assert (asking.confirming, none) == ("b", None)
    after, action = press(asking, "y", NAMES)
    assert (action, after.chosen, after.confirming) == (Action.UNLOAD, "b", "")
    for key in ("n", "q", "u", "\x1b[A"):
        after, action = press(asking, key, NAMES)
        assert (action, after.confirming, after.note) == (None, "", "b stays")


def test_q_ends() -> None:
    """In either case of the letter."""
    assert press_all("q")[1] is press_all("Q")[1] is Action.QUIT
