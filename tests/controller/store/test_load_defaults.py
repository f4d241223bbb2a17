"""What is configured for loads finds its model by any of its names, and fits it or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.load_defaults import LoadDefaults, check_load_defaults
from mlxd_controller.store.model_library import Library
from mlxd_controller.store.shelves import library_of
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import LoadSpec
from tests.support.tiny_model import write_tiny_model

SPEC = LoadSpec(rows_max=2)


def library(tmp_path: Path, defaults: LoadDefaults) -> Library:
    """One model under two names."""
    folder = tmp_path / "m"
    if not folder.exists():
        write_tiny_model(folder, seed=1)
    return library_of([("m", folder), ("n", folder)], StorePlaces(), load_defaults=defaults)


@pytest.mark.asyncio
async def test_a_model_is_configured_under_any_of_its_names(tmp_path: Path) -> None:
    """Its name, another name, its digest; whichever it is asked for by."""
    digest = (await library(tmp_path, {}).resolve("m")).digest
    for name in ("m", "n", digest):
        defaults = {name: SPEC}
        store = library(tmp_path, defaults)
        await check_load_defaults(defaults, store)
        assert (await store.resolve("m")).configured == SPEC
        assert (await store.resolve("n")).configured == SPEC
        (listed,) = await store.list_models()
        assert listed == await store.resolve("m")


@pytest.mark.asyncio
async def test_others_are_as_they_were(tmp_path: Path) -> None:
    """A name that is not there is told, and stops nothing."""
    defaults = {"later": SPEC}
    store = library(tmp_path, defaults)
    with capture_logs() as log:
        await check_load_defaults(defaults, store)
    assert (await store.resolve("m")).configured == LoadSpec()
    assert [(line["log_level"], line["model"]) for line in log] == [("warning", "later")]


@pytest.mark.asyncio
async def test_what_a_model_cannot_have_is_refused(tmp_path: Path) -> None:
    """More than its files allow, and two sections for one model: by the name in the file."""
    beyond = {"m": LoadSpec(context_length=1 << 20)}
    with pytest.raises(InvalidRequest, match=r'models."m": options.context_length: 1048576 is'):
        await check_load_defaults(beyond, library(tmp_path, beyond))
    ranks = {"m": LoadSpec(ranks=8)}
    with pytest.raises(InvalidRequest, match=r'models."m": options.ranks: 8: '):
        await check_load_defaults(ranks, library(tmp_path, ranks))
    twice = {"m": SPEC, "n": SPEC}
    with pytest.raises(InvalidRequest, match=r"is the model of 'm' too"):
        await check_load_defaults(twice, library(tmp_path, twice))
