"""Where stores are looked for, and the names that `mlxd alias` gives; no server runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import typer

from mlxd_controller.cli.stores import KeptPrompts, Stores, hub_cache_of
from mlxd_controller.settings import DiskBudget, StorePlaces
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, serving
from tests.support.cli import mlxd
from tests.support.tiny_model import write_tiny_model

HOME = Path.home()


def places(environment: dict[str, str], **own_options: str | None) -> StorePlaces:
    """Return what these settings come to."""
    return Stores(**own_options).places(environment)


def test_stores_lie_where_their_owners_put_them() -> None:
    """The defaults of each; then the variables of each, by what goes before what."""
    assert places({}) == StorePlaces(
        HOME / ".local/share/mlxd/models", HOME / ".cache/huggingface/hub", HOME / ".ollama/models"
    )
    theirs = {"XDG_DATA_HOME": "/d", "XDG_CACHE_HOME": "/c", "OLLAMA_MODELS": "/o"}
    assert places(theirs) == StorePlaces(
        Path("/d/mlxd/models"), Path("/c/huggingface/hub"), Path("/o")
    )
    hub = theirs | {"HF_HOME": "/h"}
    for variable, value in (
        ("HF_HOME", "/h/hub"), ("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HUB_CACHE", "/new"),
        ("MLXD_HUB_CACHE", "/own"),
    ):  # fmt: skip
        hub = hub if variable == "HF_HOME" else hub | {variable: value}
        assert hub_cache_of(hub) == Path(value)
    nobody = {"MLXD_MODELS_DIR": "~no-such-user/models"}
    assert places(nobody).models_dir is None
    own = theirs | {"MLXD_MODELS_DIR": "/m", "MLXD_OLLAMA_MODELS": "none"}
    assert (places(own).models_dir, places(own).ollama) == (Path("/m"), None)


def test_prompts_are_kept_only_where_somebody_says_so(tmp_path: Path) -> None:
    """Nothing by default, and with `none`; else in the user's caches, or in the folder given."""
    nothing = KeptPrompts().disk_budget({}, attached=False)
    assert nothing is KeptPrompts("none", tmp_path).disk_budget({}, attached=True) is None
    kept = KeptPrompts("2G").disk_budget({"XDG_CACHE_HOME": "/c"}, attached=False)
    assert kept == DiskBudget(Path("/c/mlxd/prefixes"), 2 << 30)
    kept = KeptPrompts("2G").disk_budget({}, attached=False)
    assert kept == DiskBudget(HOME / ".cache/mlxd/prefixes", 2 << 30)
    kept = KeptPrompts("1K", tmp_path).disk_budget({}, attached=False)
    assert kept == DiskBudget(tmp_path, 1 << 10)
    kept = KeptPrompts("1K", tmp_path, Path("~/key")).disk_budget({}, attached=False)
    assert kept == DiskBudget(tmp_path, 1 << 10, HOME / "key")
    assert KeptPrompts("none", tmp_path, Path("key")).disk_budget({}, attached=False) is None


@pytest.mark.parametrize(
    ("size", "folder", "attached", "problem"),
    [
        ("much", None, False, "much"),
        ("0", None, False, "more than 0 and at most 1024.0 TiB"),
        ("2000000G", None, False, "more than 0 and at most 1024.0 TiB"),
        ("1G", None, True, "workers that mlxd starts"),
        ("1G", Path("~no-such-user/p"), False, "--prefix-disk-folder"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(
    size: str, folder: Path | None, *, attached: bool, problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The option is named, and what would do."""
    with pytest.raises(typer.Exit):
        KeptPrompts(size, folder).disk_budget({}, attached=attached)
    assert problem in capsys.readouterr().err


def test_a_key_for_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever gives one means to keep prompts; only `none` in so many words keeps nothing."""
    for attached in (False, True):
        with pytest.raises(typer.Exit):
            KeptPrompts(prefix_disk_key=Path("key")).disk_budget({}, attached=attached)
        assert "--prefix-disk-key: needs --prefix-disk SIZE" in capsys.readouterr().err


def test_an_option_goes_before_all_and_must_be_a_folder(tmp_path: Path) -> None:
    """`none` leaves a store out; what is given and is not there is a mistake."""
    chosen = places({"HF_HUB_CACHE": "/x"}, hub_cache=str(tmp_path), ollama_models="none")
    assert (chosen.hub_cache, chosen.ollama) == (tmp_path, None)
    with pytest.raises(typer.Exit):
        places({}, models_dir=str(tmp_path / "none"))


@pytest.mark.asyncio
async def test_aliases_are_set_listed_and_removed(tmp_path: Path) -> None:
    """By a command that needs no server; what is wrong is told in a line, with its exit code."""
    run = partial(mlxd, "alias", MLXD_MODELS_DIR=str(tmp_path))
    write_tiny_model(tmp_path / "o" / "m")
    assert (await run("small", "o/m")).code == 0
    listed = await run("--json")
    assert listed.objects == [{"small": "o/m"}]
    assert (await run("--remove", "small")).code == 0
    gone = await run("--remove", "small")
    assert (gone.code, gone.err) == (3, "mlxd: no model 'small': there is no such alias\n")
    assert (await run("small")).code == 2


@pytest.mark.asyncio
async def test_an_alias_means_a_model_that_is_there(tmp_path: Path) -> None:
    """In a store, or at the server; else it is refused, but where somebody means it so."""
    run = partial(mlxd, "alias", MLXD_MODELS_DIR=str(tmp_path))
    nowhere = ("--address", "127.0.0.1:1")
    missing = await run("small", "demmo", *nowhere)
    itself = await run("demo", "demo", *nowhere)
    async with serving(Answers(models=[replies.model("served")])) as fake:
        served = await run("a", "served", "--address", fake.address)
    built_in, forced = await run("b", "demo", *nowhere), await run("c", "later", "--force")

    assert (missing.code, missing.out) == (3, "")
    assert "no model 'demmo': did you mean demo?; with --force the alias" in missing.err
    assert (itself.code, itself.err) == (
        2,
        "mlxd: alias: demo would mean itself: give the model another name\n",
    )
    assert (served.code, built_in.code, forced.code) == (0, 0, 0)
    assert (await run("--json")).objects == [{"a": "served", "b": "demo", "c": "later"}]


def test_paths_of_the_hub_are_expanded_as_its_library_does() -> None:
    """`~` and variables mean what they do there; what is not set stays as it is written."""
    for variable, value, cache in (
        ("HF_HOME", "$SCRATCH/hf", "/scratch/hf/hub"),
        ("HF_HOME", "${SCRATCH}-2", "/scratch-2/hub"),
        ("HF_HUB_CACHE", "/x/$SCRATCH_2/$NOBODY", "/x/two/$NOBODY"),
        ("HF_HUB_CACHE", "~/$SCRATCH_2", str(HOME / "two")),
        ("MLXD_HUB_CACHE", "/$SCRATCH", "/$SCRATCH"),
    ):
        environment = {"SCRATCH": "/scratch", "SCRATCH_2": "two", variable: value}
        assert hub_cache_of(environment) == Path(cache)
