"""Gemma 3 that sees against transformers' own, whose logits are in tests/data, and in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.families.sighted.gemma3 import Gemma3Config
from mlxd_models.files.image_settings import read_image_settings
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.config import IMAGES_TOGETHER_MAX
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.layers.rotating import pieces_of
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.request import Image
from mlxd_worker.engine.stepping.spans import count_whole, lasts_of
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.base import Model, Sighted
from mlxd_worker.models.families.gemma3 import SeeingGemma3, average_squares
from mlxd_worker.models.loader import inspect_model
from mlxd_worker.models.weights.reader import Reader
from tests.support.gemma3_cases import CASES, GOLDEN, HIDDEN, Case
from tests.support.golden_logits import COLUMNS, read_golden
from tests.support.shown import (
    Shown,
    decode_together,
    logits_in_pieces,
    read_together,
    read_whole,
    see_blank,
    squares_shown_by,
)
from tests.worker.tiny import caches_of, difference, ignore_progress, load

BY_NAME = {case.name: case for case in CASES}


def expected_of(case: Case) -> mx.array:
    """Return the reference's logits."""
    return mx.array(read_golden(GOLDEN)[case.name])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    """Of every window, average and number of images, with text between: within 1e-3."""
    folder = case.write(tmp_path / "model")
    model = load(folder)
    logits = read_whole(model, squares_shown_by(model, folder, case))
    expected = expected_of(case)
    assert difference(expected, mx.zeros(expected.shape)) > 1
    assert difference(logits[:, mx.array(COLUMNS)], expected) < 1e-3


@pytest.mark.parametrize("name", ["windows", "wide-windows", "all-full"])
def test_chunks_of_any_width_read_the_same(name: str, tmp_path: Path) -> None:
    """Cut before, between and behind images, where shapes are few too: the reference's logits."""
    case = BY_NAME[name]
    folder = case.write(tmp_path / "model")
    model = load(folder)
    shown, expected = squares_shown_by(model, folder, case), expected_of(case)
    for few in (False, True):
        layers = model.new_caches()
        caches = RowCaches(layers, context_max=model.context_max, rows_max=2, bounded_shapes=few)
        for widths in ([len(shown.prompt)], [1], [7], [3, 11, 1, 30]):
            logits = logits_in_pieces(model, caches, shown, widths)
            assert difference(logits[:, mx.array(COLUMNS)], expected) < 1e-3


def _rotate(features: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    return tuple(mx.concatenate([seen[1:], seen[:1]]) for seen in features)


MUTATIONS: dict[str, Callable[[Shown], Shown]] = {
    "images seen causally": lambda shown: replace(shown, spans=()),
    "images see each other": lambda shown: replace(shown, spans=(_join(shown),)),
    "a place too few": lambda shown: replace(
        shown, spans=tuple(replace(each, tokens=each.tokens - 1) for each in shown.images)
    ),
    "features scaled": lambda shown: replace(
        shown, features=tuple(seen * math.sqrt(HIDDEN) for seen in shown.features)
    ),
    "places moved": lambda shown: replace(shown, features=_rotate(shown.features)),
}


def _join(shown: Shown) -> Image:
    """Return all from the first image's begin to the last one's end as one."""
    first, last = shown.images[0], shown.images[-1]
    return replace(first, tokens=last.stop - first.start)


CONFIGS: dict[str, Callable[[Gemma3Config], Gemma3Config]] = {
    "no window": lambda c: replace(c, text=replace(c.text, windows=(None,) * c.text.layers)),
    "no norm behind the layers": lambda c: replace(c, tower=replace(c.tower, ends_normed=False)),
    "norms as stored": lambda c: replace(c, text=replace(c.text, norms_from_one=False)),
    "one rotation": lambda c: replace(c, text=replace(c.text, ropes=None)),
    "a layer less": lambda c: replace(c, tower=replace(c.tower, layers=1)),
}


def _build(folder: Path, change: Callable[[Gemma3Config], Gemma3Config] = replace) -> SeeingGemma3:
    files = inspect_model(folder)
    reader = Reader(
        files.facts, files.specs, dtype=mx.float32, keep_packed=False, progress=ignore_progress
    )
    return SeeingGemma3(change(files.config), reader)


@pytest.mark.parametrize("name", [*MUTATIONS, *CONFIGS, "averages as stored"])
def test_each_branch_acts(name: str, tmp_path: Path) -> None:
    """With one branch otherwise the logits are far from the reference's."""
    case = BY_NAME["windows"]
    folder = case.write(tmp_path / "model")
    model = _build(folder, CONFIGS.get(name, replace))
    if name == "averages as stored":
        model._place_norm = model._place_norm - 1
    shown = MUTATIONS.get(name, replace)(squares_shown_by(model, folder, case))
    logits = read_whole(model, shown)[:, mx.array(COLUMNS)]
    assert difference(logits, expected_of(case)) > 1e-2


def longer(shown: Shown) -> Shown:
    """Return a prompt in which what is shown comes three times: longer than any piece."""
    length = len(shown.prompt)
    images = [
        replace(image, start=image.start + length * turn)
        for turn in range(3)
        for image in shown.images
    ]
    return Shown(shown.prompt * 3, tuple(images), shown.features * 3)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, and prompts: with images, and of text alone."""

    model: Model
    shown: Shown
    text: Shown


@pytest.fixture(scope="module", params=["windows", "all-full"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A case with windows, and one without."""
    case = BY_NAME[request.param]
    folder = case.write(tmp_path_factory.mktemp("model"))
    model = load(folder)
    text = Shown((9, 8, 77, 100, 101, 55, 3, 2, 80))
    return Loaded(model, squares_shown_by(model, folder, case), text)


def test_long_prompts_are_attended_in_pieces_that_cut_no_image(loaded: Loaded) -> None:
    """Read at once, where a window goes round several times, and in chunks: the same logits."""
    model, shown = loaded.model, longer(loaded.shown)
    assert len(shown.prompt) > 128
    at_once = read_whole(model, shown)
    for widths in ([5], [61, 2]):
        assert difference(logits_in_pieces(model, caches_of(model), shown, widths), at_once) < 1e-4
    packed = RowCaches(model.new_caches(), context_max=512, rows_max=1, bounded_shapes=True)
    few = logits_in_pieces(model, packed, shown, [len(shown.prompt)])
    assert difference(few, at_once) < 1e-4


def test_rows_decode_together_behind_images_and_without(loaded: Loaded) -> None:
    """In one batch, ragged: each row's logits are those of one pass over all of it."""
    model, prompts = loaded.model, (loaded.shown, loaded.text, longer(loaded.shown))
    more = (44, 13, 75, 211)
    for shown, logits in zip(prompts, decode_together(model, prompts, more, width=20), strict=True):
        behind = read_whole(model, replace(shown, prompt=(*shown.prompt, *more)))
        assert difference(logits, behind[len(shown.prompt) :]) < 1e-4


def test_several_prompts_share_a_pass(loaded: Loaded) -> None:
    """Chunks of rows with images and without, where no layer slides: each row's own logits."""
    model, prompts = loaded.model, (loaded.text, loaded.shown, longer(loaded.shown))
    if not caches_of(model).sliceable:
        return
    for shown, logits in zip(prompts, read_together(model, prompts), strict=True):
        assert difference(logits, read_whole(model, shown)) < 1e-4


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


def test_quantised_keys_are_read_both_ways_too(tmp_path: Path) -> None:
    """In 8 bits logits are near those of numbers; causally read they are not."""
    case = Case("wide", text={"sliding_window_pattern": 1, "head_dim": 32})
    folder = case.write(tmp_path / "model")
    model = load(folder)
    shown = squares_shown_by(model, folder, case)
    caches = RowCaches(model.new_caches(kv=KVFormat.Q8), context_max=512, rows_max=1)
    packed = logits_in_pieces(model, caches, shown, [len(shown.prompt)])
    near = difference(packed, read_whole(model, shown))
    causal = MUTATIONS["images seen causally"](shown)
    assert near < difference(read_whole(model, causal), read_whole(model, shown)) / 4


@pytest.mark.parametrize("side", [64, 160])
def test_a_pass_takes_no_more_than_the_fit_reckons(side: int, tmp_path: Path) -> None:
    """Of as many images as are seen at once, the largest moment of a tower that evaluates them."""
    vision = {"image_size": side, "intermediate_size": 20}
    case = Case("memory", vision=vision, more={"mm_tokens_per_image": 64})
    folder = case.write(tmp_path / "model")
    model = load(folder)
    settings = read_image_settings(folder, side=side)
    sight = inspect_model(folder).footprint.sight
    assert sight is not None
    features, taken_nbytes = see_blank(model, settings, (IMAGES_TOGETHER_MAX, side, side))
    assert features.shape == (IMAGES_TOGETHER_MAX, 64, HIDDEN)
    said_nbytes = sight.seeing_nbytes(4)
    assert taken_nbytes <= said_nbytes
    assert taken_nbytes > said_nbytes / 6, "far more than is needed"


@pytest.mark.skipif(not runs_cpu(), reason="elsewhere images are seen together")
@pytest.mark.parametrize("form", [FloatType.F32, FloatType.BF16])
@pytest.mark.parametrize(
    ("vision", "most"),
    [
        ({"image_size": 256, "intermediate_size": 20}, "scores in parts"),
        ({"image_size": 128, "intermediate_size": 2048}, "the feed-forward"),
        ({"image_size": 512, "patch_size": 32, "intermediate_size": 20}, "pixels"),
    ],
)
def test_one_image_takes_what_the_fit_reckons(
    vision: Mapping[str, Any], most: str, form: FloatType, tmp_path: Path
) -> None:
    """A CPU sees one at a time, a part of a layer after another; whatever the widest is. Stored in
    16 bits, pixels are float32 all the same."""
    folder = Case("memory", vision=vision, more={"mm_tokens_per_image": 64}).write(tmp_path / "m")
    side = vision["image_size"]
    sight = inspect_model(folder).footprint.sight
    assert sight is not None
    settings = read_image_settings(folder, side=side)
    _, taken_nbytes = see_blank(load(folder, form), settings, (1, side, side))
    said_nbytes = sight.seeing_nbytes(form.nbytes, on_cpu=True)
    assert 0.8 * said_nbytes < taken_nbytes <= said_nbytes, most


def test_squares_are_averaged() -> None:
    """Line by line, what is left at the edges not counted."""
    rows = mx.arange(25, dtype=mx.float32).reshape(1, 25, 1)
    assert average_squares(rows, 2, 2).reshape(-1).tolist() == [3.0, 5.0, 13.0, 15.0]


IMAGE = Image(b"", 10, 8, b"", whole=True)


@pytest.mark.parametrize(
    ("first", "count", "read_count"),
    [(0, 5, 5), (0, 10, 10), (0, 13, 10), (0, 18, 18), (0, 30, 30), (10, 3, 8), (10, 9, 9),
     (12, 2, 6), (12, 6, 6), (18, 4, 4)],
)  # fmt: skip
def test_no_count_of_tokens_cuts_an_image(first: int, count: int, read_count: int) -> None:
    """It ends before, or where it begins within one, behind; others are cut anywhere."""
    assert count_whole([IMAGE], first, count) == read_count
    assert count_whole([replace(IMAGE, whole=False)], first, count) == count
    lasts = lasts_of([([IMAGE], first, read_count)])
    for at in range(len(lasts)):
        position = first + at
        assert lasts[at] == (17 if 10 <= position < 18 else position)


@pytest.mark.parametrize("piece", [1, 4, 8, 9, 11, 64])
def test_no_piece_cuts_an_image(piece: int) -> None:
    """Pieces are as long as they may be, and all tokens are in one."""
    start, width = 3, 40
    images = [IMAGE, replace(IMAGE, start=20)]
    lasts = lasts_of([(images, start, width)])
    pieces = list(pieces_of(width, piece, start, lasts))
    assert [first for first, _ in pieces] == [0, *(sum(pair) for pair in pieces[:-1])]
    assert sum(pieces[-1]) == width
    for first, count in pieces:
        assert count <= max(piece, IMAGE.tokens)
        assert max(lasts[first : first + count]) < start + first + count
    assert list(pieces_of(9, 4, 0, ())) == [(0, 4), (4, 4), (8, 1)]
