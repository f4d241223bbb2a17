"""Qwen2.5-VL against transformers' own, whose logits are in tests/data, and itself in pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from mlxd_models.families.registry import REGISTRY
from mlxd_models.families.sighted.windowed import FED_AT_ONCE
from mlxd_models.files.image_settings import read_image_settings
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.config import IMAGE_PLACES_MAX
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.base import Model, Sighted
from mlxd_worker.models.layers.tower_attention import attend_bounded
from mlxd_worker.models.layers.windowed_tower import lay_windows
from tests.support.golden_logits import COLUMNS, read_golden
from tests.support.qwen_vl_cases import CASES, GOLDEN, PIECES, PLACE, Case
from tests.support.seeing_shapes import SIDE
from tests.support.shown import (
    Shown,
    decode_together,
    logits_in_pieces,
    read_together,
    read_whole,
    see_blank,
    shown_by,
)
from tests.worker.tiny import caches_of, difference, load


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    """Of windows, sections, merges and frames, with three images of other shapes and text between:
    within 1e-3."""
    folder = case.write(tmp_path / "model")
    model = load(folder)
    shown = shown_by(model, folder, case)
    assert [len(seen) for seen in shown.features] == [15, 4, 8]
    logits = read_whole(model, shown)
    expected = mx.array(read_golden(GOLDEN)[case.name])
    assert difference(expected, mx.zeros(expected.shape)) > 1
    assert difference(logits[:, mx.array(COLUMNS)], expected) < 1e-3


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, and two prompts: with images, and of text alone."""

    model: Model
    shown: Shown
    text: Shown


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The first case."""
    case = CASES[0]
    folder = case.write(tmp_path_factory.mktemp("model"))
    model = load(folder)
    return Loaded(model, shown_by(model, folder, case), Shown((9, 8, 7, 100, 101, 55, 3, 2, 80)))


def test_a_chunk_may_end_anywhere(loaded: Loaded) -> None:
    """Within a row of places, between rows, images and texts: the logits are those of one pass."""
    model, shown = loaded.model, loaded.shown
    caches = caches_of(model)
    whole = logits_in_pieces(model, caches, shown, [len(shown.prompt)])
    for widths in ([1], [4], [7], [16], [3, 11, 1]):
        assert difference(logits_in_pieces(model, caches, shown, widths), whole) < 1e-4


def test_places_decide_what_an_image_says(loaded: Loaded) -> None:
    """Read as if it were text by its positions, or as one row of places, it says something else."""
    model, shown = loaded.model, loaded.shown
    whole = read_whole(model, shown)
    for other in (None, "flat"):
        images = tuple(
            replace(image, grid=None if other is None else (1, image.tokens))
            for image in shown.images
        )
        logits = read_whole(model, replace(shown, images=images))
        assert difference(logits[-1], whole[-1]) > 0.01


def test_rows_decode_together_each_at_its_own_places(loaded: Loaded) -> None:
    """Behind images and without any, in one batch: each row's logits are those of one pass."""
    model, prompts = loaded.model, (loaded.shown, loaded.text, _shorter(loaded.shown))
    more = (44, 13, 5 + 70, 211)
    for shown, logits in zip(prompts, decode_together(model, prompts, more, width=99), strict=True):
        longer = replace(shown, prompt=(*shown.prompt, *more))
        assert difference(logits, read_whole(model, longer)[len(shown.prompt) :]) < 1e-4


def test_several_prompts_share_a_pass(loaded: Loaded) -> None:
    """Chunks of rows with images and without, one after another: each row's logits are its own."""
    model, prompts = loaded.model, (loaded.text, loaded.shown, _shorter(loaded.shown))
    assert model.capabilities.reads_chunks
    for shown, logits in zip(prompts, read_together(model, prompts), strict=True):
        assert difference(logits, read_whole(model, shown)) < 1e-4


PASSES = {
    "windows": (Case("m", vision={"fullatt_block_indexes": [], "intermediate_size": 20}), 24),
    "over all": (Case("m", vision={"fullatt_block_indexes": [1], "intermediate_size": 20}), 24),
    "feed-forward": (Case("m", vision={"fullatt_block_indexes": [], "intermediate_size": 400}), 40),
    "two wide heads": (
        Case("m", vision={"hidden_size": 128, "fullatt_block_indexes": [], "intermediate_size": 20,
                          "window_size": 4 * SIDE}), 16,
    ),
    "windows in two parts": (
        Case("m", vision={"hidden_size": 80, "num_heads": 20, "fullatt_block_indexes": [],
                          "intermediate_size": 20, "window_size": 4 * SIDE}), 60,
    ),
    "over all in parts": (
        Case("m", vision={"hidden_size": 64, "num_heads": 4, "fullatt_block_indexes": [0, 1, 2],
                          "intermediate_size": 20}), 24,
    ),
}  # fmt: skip
"""Towers, each with another widest part, and how many places to a side their images have."""


@pytest.mark.parametrize("form", [FloatType.F32, FloatType.BF16])
@pytest.mark.parametrize("widest", PASSES)
def test_a_pass_takes_no_more_than_the_fit_reckons(
    widest: str, form: FloatType, tmp_path: Path
) -> None:
    """The largest moment of a tower that evaluates an image, whatever takes most of it, in float32
    and as stored in 16 bits, where what is float32 all the same counts as that."""
    case, side = PASSES[widest]
    folder = case.write(tmp_path / "model")
    model, family = load(folder, form), REGISTRY["Qwen2_5_VLForConditionalGeneration"]
    places, length = side * side, side * case.side
    settings = read_image_settings(folder, side=case.side, places_max=IMAGE_PLACES_MAX)
    features, taken_nbytes = see_blank(model, settings, (1, length, length))
    assert features.shape == (1, places, 32)
    config = family.parse(case.config)
    tower, sight = config.tower, family.footprint(config).sight
    assert sight is not None
    sizes = replace(
        sight,
        pass_values=tower.pass_values_of(places),
        settled_values=tower.settled_values_of(places),
        float_values=tower.float_values_of(places),
    )
    said_nbytes = sizes.seeing_nbytes(form.nbytes, on_cpu=runs_cpu())
    assert taken_nbytes <= said_nbytes
    assert taken_nbytes > said_nbytes * (0.7 if runs_cpu() else 0.25), "far more than is needed"


def test_patches_that_are_fed_apart_become_the_same(tmp_path: Path) -> None:
    """An image has more patches than are fed at once: the windows of its last corner become what
    they become in an image that is only that corner."""
    case = Case("apart", vision={"fullatt_block_indexes": []})
    folder = case.write(tmp_path / "model")
    model = load(folder)
    settings = read_image_settings(folder, side=case.side, places_max=IMAGE_PLACES_MAX)
    side, corner = 34, 8
    assert side * side * case.merge**2 > FED_AT_ONCE > corner * corner * case.merge**2
    length, own = side * case.side, corner * case.side
    pixels = mx.random.randint(0, 256, (1, length, length, 3), key=mx.random.key(5))
    pixels = pixels.astype(mx.uint8)
    assert isinstance(model, Sighted)
    whole = model.see(pixels, settings).reshape(side, side, -1)
    alone = model.see(pixels[:, length - own :, length - own :], settings)
    assert difference(whole[-corner:, -corner:].reshape(alone.shape), alone) < 1e-4
    assert difference(whole[:corner, :corner].reshape(alone.shape), alone) > 0.01


def _shorter(shown: Shown) -> Shown:
    """Return a prompt of the first image alone, and a token behind it."""
    image = shown.images[0]
    prompt = (*PIECES[0], *[PLACE] * image.tokens, 33)
    return Shown(prompt, (image,), shown.features[:1])


@pytest.mark.parametrize(
    ("rows", "columns", "window", "groups"), [
        (4, 6, 2, ((6, 4),)), (3, 5, 2, ((2, 4), (3, 2), (1, 1))), (1, 3, 4, ((1, 3),)),
        (5, 4, 4, ((1, 16), (1, 4))),
    ],
)  # fmt: skip
def test_windows_of_one_size_lie_together(
    rows: int, columns: int, window: int, groups: tuple[tuple[int, int], ...]
) -> None:
    """Every place lies in one window, whose places are within its square of the image."""
    windows = lay_windows(rows, columns, window)
    assert windows.groups == groups
    assert sorted(windows.order) == list(range(rows * columns))
    first = 0
    for count, size in windows.groups:
        for _ in range(count):
            places = windows.order[first : first + size]
            squares = {(at // columns // window, at % columns // window) for at in places}
            assert len(squares) == 1
            first += size


@pytest.mark.parametrize("scores_max", [1, 50, 200, 700])
def test_attention_in_parts_is_attention(scores_max: int) -> None:
    """Some windows at once, or some queries of one, read what all at once would."""
    keys = mx.random.split(mx.random.key(3), 3)
    queries, keys_, values = (mx.random.normal((3, 2, 9, 8), key=key) for key in keys)
    whole = attend_bounded(queries, keys_, values)
    apart = attend_bounded(queries, keys_, values, scores_max=scores_max)
    assert difference(apart, whole) < 1e-5
    assert cast("float", mx.max(mx.abs(whole)).item()) > 0.1
