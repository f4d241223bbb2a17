"""Patterns of aliases: the names that agents ask for by themselves, and the models they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.aliases import ALIASES_FILE, read_aliases, remove_alias, set_alias
from mlxd_controller.store.model_library import Library
from mlxd_controller.store.naming import match_pattern
from mlxd_controller.store.shelves import library_of
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, ModelNotFound
from tests.support.tiny_model import write_tiny_model

MATCHES = [
    ("claude-opus-5", "claude-*"),
    ("claude-haiku-5", "claude-haiku-*"),
    ("claude-", "claude-*"),
    ("claude", None),
    ("claude-opus:latest", None),
    ("exact", None),
]


@pytest.mark.parametrize(("name", "pattern"), MATCHES)
def test_the_longest_pattern_counts(name: str, pattern: str | None) -> None:
    """Of those with which the name begins; `:latest` is asked for without it next."""
    assert match_pattern(name, ["claude-*", "claude-haiku-*", "gpt-*", "exact"]) == pattern


@pytest.mark.parametrize("alias", ["*", "a*b", "a**", "*a", "-*", "a b*"])
def test_a_pattern_has_one_star_at_its_end(alias: str, tmp_path: Path) -> None:
    """Behind the beginning of a name; anything else is refused, and the file is not made."""
    with pytest.raises(InvalidRequest, match="alias"):
        set_alias(tmp_path, alias, "m")
    assert not (tmp_path / ALIASES_FILE).exists()


def test_a_pattern_is_no_model(tmp_path: Path) -> None:
    """No alias means a pattern; a file that says so is damaged."""
    set_alias(tmp_path, "a-*", "m")
    with pytest.raises(InvalidRequest, match="name"):
        set_alias(tmp_path, "b", "a-*")
    (tmp_path / ALIASES_FILE).write_text('{"version": 1, "aliases": {"b": "a-*"}}')
    with pytest.raises(InvalidModel):
        read_aliases(tmp_path)


def library_with_patterns(root: Path) -> Library:
    """Return a store of "big" and "claude-own", and patterns of which one leads nowhere."""
    write_tiny_model(root / "models" / "big", seed=1)
    folder = write_tiny_model(root / "own", seed=2)
    for alias, target in (("claude-*", "big"), ("gpt-*", "gone"), ("claude-fast-*", "claude-own")):
        set_alias(root / "models", alias, target)
    return library_of([("claude-own", folder)], StorePlaces(root / "models", None, None))


@pytest.mark.asyncio
async def test_a_name_that_no_model_has_means_what_its_pattern_means(tmp_path: Path) -> None:
    """Exact names win, whoever gave them; a pattern that leads nowhere says so."""
    library = library_with_patterns(tmp_path)
    big, own = await library.resolve("big"), await library.resolve("claude-own")

    assert (await library.resolve("claude-opus-5")).digest == big.digest != own.digest
    assert (await library.resolve("claude-fast-1")).digest == own.digest
    set_alias(tmp_path / "models", "claude-exact", "claude-own")
    assert (await library.resolve("claude-exact")).digest == own.digest
    with pytest.raises(ModelNotFound, match="alias of gone"):
        await library.resolve("gpt-5")
    with pytest.raises(ModelNotFound, match="known"):
        await library.resolve("other")
    remove_alias(tmp_path / "models", "claude-*")
    with pytest.raises(ModelNotFound):
        await library.resolve("claude-opus-5")


@pytest.mark.asyncio
async def test_patterns_are_not_listed_and_take_no_name(tmp_path: Path) -> None:
    """Models have their own names alone, whatever was asked for; loads may give what one means."""
    library = library_with_patterns(tmp_path)
    for _ in range(2):
        listed = await library.list_models()
        assert [model.name for model in listed] == ["big", "claude-own"]
        assert (await library.resolve("claude-opus-5")).aliases == ()
    folder = write_tiny_model(tmp_path / "third", seed=3)
    taken_in = await library.add(folder, name="claude-third")
    assert (await library.resolve("claude-third")).digest == taken_in.digest


@pytest.mark.asyncio
async def test_aliases_that_cannot_be_read_may_hold_the_pattern(tmp_path: Path) -> None:
    """A name that is nobody's is told of the file."""
    library = library_with_patterns(tmp_path)
    (tmp_path / "models" / ALIASES_FILE).write_text("{")
    with pytest.raises(InvalidModel, match="may be an alias"):
        await library.resolve("claude-opus-5")
