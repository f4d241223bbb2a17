"""What was read of models: kept for as long as it holds, and nothing besides."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxd_controller.store.folder import READINGS_MAX, Readings, read_folder
from mlxd_models.describe import Description
from mlxd_models.families.foreign import FOREIGN, MLX_LM, parse_foreign
from mlxd_models.families.foreign_parts import ForeignConfig, check_installed
from mlxd_models.fit.facts import Parts, Undescribed
from mlxd_models.fit.rank_facts import parts_of_ranks
from mlxd_shared.config import STATUS_TEXT_BYTES_MAX
from mlxd_shared.domain.errors import InvalidModel, MachineShort
from mlxd_shared.domain.requests import Weights
from tests.support.made_stores import tensor_file
from tests.support.tiny_model import write_tiny_model


@pytest.mark.asyncio
async def test_a_kept_error_holds_on_to_nothing(tmp_path: Path) -> None:
    """However often it is told: a traceback would keep the file's content, and grow each time."""
    folder = write_tiny_model(tmp_path / "m")
    (folder / "config.json").write_text("{" + " " * 1000)
    readings = Readings()
    for _ in range(3):
        with pytest.raises(InvalidModel, match="not JSON"):
            await readings.read_good(folder)
    kept = readings.last(folder)
    assert kept is not None
    assert kept.error is not None
    assert kept.error.__traceback__ is None
    assert kept.error.__cause__ is kept.error.__context__ is None


@pytest.mark.asyncio
async def test_a_kept_error_is_short(tmp_path: Path) -> None:
    """What a file says is told in part: a page of such models still goes into a message."""
    folder = write_tiny_model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"architectures": "x" * (1 << 20)}))
    error = (await Readings().read(folder)).error
    assert error is not None
    assert error.field == "architectures"
    assert len(error.describe()) < 2 * STATUS_TEXT_BYTES_MAX


@pytest.mark.asyncio
async def test_a_slow_model_keeps_no_other_waiting(tmp_path: Path) -> None:
    """What is read later and sooner done is told sooner."""
    slow, quick = write_tiny_model(tmp_path / "slow"), write_tiny_model(tmp_path / "quick")
    config = json.loads((slow / "config.json").read_text())
    (slow / "config.json").write_text(json.dumps(config | {"pad": "x" * (8 << 20)}))
    many = {f"model.layers.0.{index}": ("F32", (), bytes(4)) for index in range(20_000)}
    (slow / "model.safetensors").write_bytes(tensor_file(many))
    readings = Readings()
    later = asyncio.create_task(readings.read(slow))
    await asyncio.sleep(0)
    await readings.read(quick)
    assert not later.done()
    assert (await later).error is not None  # none of these tensors is a Llama's


@pytest.mark.asyncio
async def test_readings_have_a_bound(tmp_path: Path) -> None:
    """A client may have any folder looked at: those of longest ago are forgotten."""
    readings = Readings()
    first = tmp_path / "0"
    for number in range(READINGS_MAX):
        await readings.read(tmp_path / str(number))
    await readings.read(first)
    assert readings.last(first) is not None
    await readings.read(tmp_path / "more")

    assert readings.last(tmp_path / "1") is None
    assert readings.last(first) is not None


class Counting:
    """Describes what ranks have, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, described: Description) -> Parts:
        """Count, and describe."""
        self.count += 1
        return parts_of_ranks(described)


@pytest.mark.asyncio
async def test_ranks_are_described_when_they_are_needed_and_once(tmp_path: Path) -> None:
    """Not by a reading; all who have the facts share what was described."""
    folder, counting = write_tiny_model(tmp_path / "m"), Counting()
    readings = Readings(describe_parts=counting)
    first, second = await readings.read_good(folder), await readings.read_good(folder)
    assert counting.count == 0
    with pytest.raises(Undescribed):
        first.facts.of_ranks(2)

    await asyncio.gather(first.facts.division.describe(), second.facts.division.describe())
    copied = replace(first.facts, context_length_max=1)
    assert copied.of_ranks(2).elements < first.facts.elements
    assert (await readings.read_good(folder)).facts.division.described
    assert counting.count == 1


@pytest.mark.asyncio
async def test_ranks_of_a_model_that_has_changed_are_not_described(tmp_path: Path) -> None:
    """They would be another model's; a reading of what is there now describes its own."""
    folder, counting = write_tiny_model(tmp_path / "m"), Counting()
    readings = Readings(describe_parts=counting)
    facts = (await readings.read_good(folder)).facts
    config = (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    await facts.division.describe()
    assert counting.count == 0
    assert "config.json" in facts.division.problem or "changed" in facts.division.problem
    assert facts.division.problem in (facts.division_problem(2, Weights.AUTO) or "")

    (folder / "config.json").write_text(config)
    now = (await readings.read_good(folder)).facts
    await now.division.describe()
    assert now.division_problem(2, Weights.AUTO) is None
    assert counting.count == 1


@pytest.mark.asyncio
async def test_ranks_that_could_not_be_described_are_tried_again(tmp_path: Path) -> None:
    """With the next reading, though no file has changed: the machine may have been short."""
    folder, counting = write_tiny_model(tmp_path / "m"), Counting()
    short = [MachineShort("open files", "reading a folder")]

    def describe_parts(described: Description) -> Parts:
        if short:
            raise short.pop()
        return counting(described)

    readings = Readings(describe_parts=describe_parts)
    facts = (await readings.read_good(folder)).facts
    await facts.division.describe()
    assert facts.division.problem
    again = (await readings.read_good(folder)).facts
    await again.division.describe()
    assert again.division_problem(2, Weights.AUTO) is None


def test_another_process_gets_what_is_known(tmp_path: Path) -> None:
    """A fleet's machines send facts; how to describe the rest stays where the files are."""
    facts = read_folder(write_tiny_model(tmp_path / "m")).facts
    assert not pickle.loads(pickle.dumps(facts)).division.described
    asyncio.run(facts.division.describe())
    sent = pickle.loads(pickle.dumps(facts))
    assert sent.of_ranks(2) == facts.of_ranks(2)


def not_installed(config: Any) -> ForeignConfig:
    """Refuse a config as an installation without mlx-lm does."""
    stated = parse_foreign(config)
    check_installed(MLX_LM, stated.name, None)
    return stated


@pytest.mark.asyncio
async def test_a_model_of_mlx_lms_is_refused_where_its_worker_would_not_have_it(
    tmp_path: Path,
) -> None:
    """Before anybody makes room for it, and by what to install; others may have it elsewhere."""
    folder = write_tiny_model(tmp_path / "m")
    file = folder / "config.json"
    theirs = {"architectures": ["CohereForCausalLM"], "model_type": "cohere"}
    file.write_text(json.dumps(json.loads(file.read_text()) | theirs))
    here = Readings(replace(FOREIGN, parse=not_installed))

    refused, elsewhere = await here.read(folder), await Readings().read(folder)

    assert refused.error is not None
    assert (refused.error.file, refused.error.field) == ("config.json", "model_type")
    assert "install mlxd[zoo]" in refused.error.problem
    assert elsewhere.folder is not None
    assert elsewhere.folder.facts.caches.foreign
