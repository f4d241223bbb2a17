"""LLaVA against transformers' own, whose logits are in tests/data, and against itself in pieces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.files.image_settings import read_image_settings
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch, Inlay, Model, Sighted
from tests.support.golden_logits import COLUMNS, read_golden
from tests.support.llava_cases import CASES, GOLDEN, Case
from tests.worker.tiny import caches_of, difference, load

ROW = RowId(1)


def features_of(model: Model, folder: Path, case: Case) -> mx.array:
    """Return what the model sees of a case's images."""
    assert isinstance(model, Sighted)
    settings = read_image_settings(folder, side=case.side)
    return model.see(mx.array(case.pixels()), settings)


def logits_in_pieces(
    model: Model, caches: RowCaches, case: Case, features: mx.array, width: int
) -> mx.array:
    """Return the logits of a case's prompt, read `width` tokens at a time."""
    caches.join(ROW, tokens=len(case.prompt))
    parts = []
    for begin in range(0, len(case.prompt), width):
        tokens = case.prompt[begin : begin + width]
        inlays = []
        for start, seen in zip(case.starts, features, strict=True):
            first, last = max(start, begin), min(start + case.tokens, begin + len(tokens))
            if first < last:
                inlays.append(Inlay(first - begin, seen[first - start : last - start]))
        batch = replace(Batch.prefill(tokens, begin, ROW), inlays=tuple(inlays))
        parts.append(model.logits(model.forward(batch, caches)))
        mx.eval(parts[-1], caches.state())
    caches.leave(ROW)
    return mx.concatenate(parts, axis=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    """Of every tower, text, strategy and layer, with two images and text between: within 1e-3."""
    folder = case.write(tmp_path / "model")
    model = load(folder)
    features = features_of(model, folder, case)
    assert features.shape == (2, case.tokens, 32)
    logits = logits_in_pieces(model, caches_of(model), case, features, len(case.prompt))
    expected = mx.array(read_golden(GOLDEN)[case.name])
    assert difference(expected, mx.zeros(expected.shape)) > 1
    assert difference(logits[:, mx.array(COLUMNS)], expected) < 1e-3


@pytest.mark.parametrize("width", [1, 4, 7, 11])
def test_a_chunk_may_end_within_an_image(width: int, tmp_path: Path) -> None:
    """Chunks of any width give the logits of one pass."""
    case = CASES[0]
    folder = case.write(tmp_path / "model")
    model = load(folder)
    features = features_of(model, folder, case)
    caches = caches_of(model)
    whole = logits_in_pieces(model, caches, case, features, len(case.prompt))
    assert difference(logits_in_pieces(model, caches, case, features, width), whole) < 1e-4


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
