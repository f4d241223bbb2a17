"""Sampling defaults out of generation_config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxd_models.files.generation_defaults import read_generation_defaults
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import SamplingOptions


def defaults(folder: Path, values: Any) -> SamplingOptions:
    """Return what a file with these values says."""
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_generation_defaults(folder)


def test_values_are_taken(tmp_path: Path) -> None:
    """Each value that is given is a default, others stay absent; a whole float is an integer."""
    values = {"temperature": 0.6, "top_k": 20.0, "top_p": 0.95, "bos_token_id": 1}

    assert defaults(tmp_path, values) == SamplingOptions(temperature=0.6, top_k=20, top_p=0.95)
    assert defaults(tmp_path, {"min_p": 0.1, "top_k": None}) == SamplingOptions(min_p=0.1)


def test_no_sampling_means_greedy(tmp_path: Path) -> None:
    """`do_sample: false` wins over the values beside it."""
    assert defaults(tmp_path, {"do_sample": False, "top_k": 20}) == SamplingOptions(temperature=0.0)
    assert defaults(tmp_path, {"do_sample": True, "top_k": 20}) == SamplingOptions(top_k=20)


def test_a_repetition_penalty_holds_for_greedy_too(tmp_path: Path) -> None:
    """The model's own repetition penalty is a default, whether it samples or not."""
    penalty = SamplingOptions(repetition_penalty=1.1)
    assert defaults(tmp_path, {"repetition_penalty": 1.1}) == penalty
    greedy = {"do_sample": False, "repetition_penalty": 1.1}
    assert defaults(tmp_path, greedy) == replace(penalty, temperature=0.0)


def test_without_a_file_nothing_is_said(tmp_path: Path) -> None:
    """The file is optional."""
    assert read_generation_defaults(tmp_path) == SamplingOptions()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1},
        {"top_k": 1.5},
        {"top_p": 2},
        {"min_p": "a"},
        {"temperature": True},
        {"repetition_penalty": 0},
        {"top_k": 10**400},
    ],
)
def test_nonsense_is_passed_over(tmp_path: Path, values: dict[str, Any]) -> None:
    """A value that no request could have is no default, and its neighbours still are."""
    assert defaults(tmp_path, values) == SamplingOptions()
    own = {"top_p": 0.5, "top_k": 7}
    expected = SamplingOptions(
        top_p=None if "top_p" in values else 0.5, top_k=None if "top_k" in values else 7
    )
    assert defaults(tmp_path, {**own, **values}) == expected


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    """What is no JSON object is the model's fault, by name."""
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(InvalidModel, match="not JSON"):
        read_generation_defaults(tmp_path)
    with pytest.raises(InvalidModel, match="not a JSON object"):
        defaults(tmp_path, [])
