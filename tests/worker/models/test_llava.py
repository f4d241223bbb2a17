"""LLaVA against transformers' own, whose logits are in tests/data, and against itself in pieces."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.files.image_settings import read_image_settings
from mlxd_worker.models.base import Sighted
from tests.support.golden_logits import COLUMNS, read_golden
from tests.support.llava_cases import CASES, GOLDEN, Case
from tests.support.shown import logits_in_pieces, read_whole, squares_shown_by
from tests.worker.tiny import caches_of, difference, load


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    """Of every tower, text, strategy and layer, with two images and text between: within 1e-3."""
    folder = case.write(tmp_path / "model")
    model = load(folder)
    shown = squares_shown_by(model, folder, case)
    assert [seen.shape for seen in shown.features] == [(case.tokens, 32)] * 2
    logits = read_whole(model, shown)
    expected = mx.array(read_golden(GOLDEN)[case.name])
    assert difference(expected, mx.zeros(expected.shape)) > 1
    assert difference(logits[:, mx.array(COLUMNS)], expected) < 1e-3


@pytest.mark.parametrize("width", [1, 4, 7, 11])
def test_a_chunk_may_end_within_an_image(width: int, tmp_path: Path) -> None:
    """Chunks of any width give the logits of one pass."""
    case = CASES[0]
    folder = case.write(tmp_path / "model")
    model = load(folder)
    shown = squares_shown_by(model, folder, case)
    caches = caches_of(model)
    whole = logits_in_pieces(model, caches, shown, [len(case.prompt)])
    assert difference(logits_in_pieces(model, caches, shown, [width]), whole) < 1e-4


def test_images_of_a_batch_do_not_mix(tmp_path: Path) -> None:
    """An image has the same features alone and beside others."""
    case = CASES[0]
    folder = case.write(tmp_path / "model")
    model = load(folder)
    assert isinstance(model, Sighted)
    settings, pixels = read_image_settings(folder, side=case.side), mx.array(case.pixels())
    together = model.see(pixels, settings)
    apart = mx.concatenate([model.see(pixels[at : at + 1], settings) for at in range(2)])
    assert difference(together, apart) < 1e-4
    assert difference(together[0], together[1]) > 0.1
