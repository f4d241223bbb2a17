"""What `tests.bench.seeing` makes of what its clients saw, and the model that it writes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mlxd_controller.store.folder import read_folder
from mlxd_models.families.registry import REGISTRY
from tests.bench.seeing import arguments, measure_crowd, split_first_token
from tests.bench.seeing_client import Came
from tests.bench.seeing_model import SHAPES, config_of, write_model


def came(sent_s: float, first_s: float, last_s: float, *, prompt_s: float) -> Came:
    """Return what came of a request of 100 tokens, of which 99 were known."""
    return Came(sent_s, first_s, last_s, 100, 99, 0.0, prompt_s, last_s - first_s)


def test_a_crowd_is_as_fast_as_its_last() -> None:
    """Tokens of all, over the time from the first request to the last token."""
    figures = measure_crowd(
        [came(1.0, 2.0, 5.0, prompt_s=1), came(1.5, 4.5, 9.0, prompt_s=1)], new=10
    )
    assert figures["tokens_per_s"] == 20 / 8
    assert (figures["ttft_p50_s"], figures["ttft_max_s"]) == (2.0, 3.0)
    assert (figures["prompt_tokens"], figures["cached_tokens"]) == (100, 99)


def test_a_first_token_is_split_into_its_parts() -> None:
    """What a text takes too is prefill; what pictures take beyond is the tower's in the passes, and
    the file's before them: the parts are the whole."""
    pictures, texts = came(0.0, 10.0, 11.0, prompt_s=7.0), came(0.0, 2.5, 3.0, prompt_s=2.0)
    figures = split_first_token([pictures], [texts])
    assert (figures["tower_s"], figures["prefill_s"], figures["file_s"]) == (5.0, 2.0, 2.5)
    parts = figures["tower_s"] + figures["file_s"] + figures["text_ttft_s"]
    assert parts == figures["ttft_s"] == 10.0


def test_a_cpu_has_a_small_form() -> None:
    """Unless another shape is named."""
    assert arguments(["--device", "cuda"]).shape == "7b"
    assert arguments(["--device", "cpu"]).shape == "tiny"
    assert arguments(["--device", "cpu", "--shape", "7b"]).shape == "7b"


@pytest.mark.parametrize("name", ["tiny"])
def test_the_model_that_is_written_can_be_described(name: str, tmp_path: Path) -> None:
    """It sees, in its own shape."""
    write_model(tmp_path / name, SHAPES[name])
    sight = read_folder(tmp_path / name).facts.sight
    assert sight is not None
    assert sight.varies


def test_the_large_shape_is_of_eight_thousand_million_values() -> None:
    """As published: with its tower and its head."""
    config = config_of(SHAPES["7b"])
    family = REGISTRY[config["architectures"][0]]
    tensors = family.tensors(family.parse(config))
    values = sum(math.prod(spec.shape) for spec in tensors if spec.required)
    assert 8.2e9 < values < 8.4e9
