"""Which names and patterns a pull takes, and what is said of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_controller.pulling.wanted import Wanted, is_on_a_hub, wanted_of
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest

CACHE = Path("/cache")


@pytest.mark.parametrize(
    ("model", "repository", "revision", "name"),
    [
        ("o/m", "o/m", "main", "o/m"),
        ("gpt2", "gpt2", "main", "gpt2"),
        ("o/m@main", "o/m", "main", "o/m"),
        ("o/m-1.5_B@refs/pr/1", "o/m-1.5_B", "refs/pr/1", "o/m-1.5_B@refs/pr/1"),
    ],
)
def test_a_name_is_a_repository_and_a_revision(
    model: str, repository: str, revision: str, name: str
) -> None:
    """Without one it is `main`, by which the stores leave it out of the name."""
    wanted = wanted_of(model, (), CACHE)
    assert wanted == Wanted(repository, revision, CACHE)
    assert wanted.name == name


@pytest.mark.parametrize(
    "model",
    ["", "../x", "o/m@..", "o/m@", "o/m@-x", "o/m@a//b", "o--m", "a/b/c", "o/m:latest", "o/m\n"],
)
def test_what_might_lead_out_of_the_cache_is_refused(model: str) -> None:
    """By the field, before any hub is asked."""
    with pytest.raises(InvalidRequest, match="model: "):
        wanted_of(model, (), CACHE)


def test_names_and_patterns_are_bounded() -> None:
    """Each bound is said with the field; the most that may be is taken, in an order of its own."""
    longest = "o/" + "a" * (config.MODEL_NAME_CHARS_MAX - 2)
    assert wanted_of(longest, (), CACHE).repository == longest
    with pytest.raises(InvalidRequest, match=f"model: at most {config.MODEL_NAME_CHARS_MAX}"):
        wanted_of(longest + "a", (), CACHE)

    patterns = [f"{number}" for number in range(config.PULL_PATTERNS_MAX)]
    assert len(wanted_of("o/m", patterns, CACHE).include) == config.PULL_PATTERNS_MAX
    with pytest.raises(InvalidRequest, match=f"include: at most {config.PULL_PATTERNS_MAX}"):
        wanted_of("o/m", [*patterns, "x"], CACHE)
    for bad in ("", "x" * (config.PULL_PATTERN_CHARS_MAX + 1)):
        with pytest.raises(InvalidRequest, match=r"include\[1\]: "):
            wanted_of("o/m", ["*", bad], CACHE)
    assert wanted_of("o/m", ["b", "a", "b"], CACHE) == wanted_of("o/m", ["a", "b"], CACHE)


@pytest.mark.parametrize(
    ("name", "may_be"),
    [("o/m", True), ("o/m@v1", True), ("nobody", False), ("/a/folder", False), ("./o", False)],
)
def test_which_names_a_hub_may_have(name: str, may_be: bool) -> None:
    """Those of two parts: others are much more likely to be misspelt."""
    assert is_on_a_hub(name) is may_be
