"""Images through mlx-vlm in an engine: streams say what one pass over everything says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_worker.vision.sight import Placed
from tests.support.seeing_engines import Around, Seeing, change_value, seeing_engine
from tests.support.tiny_model import write_tiny_model
from tests.worker.vlm import CASES, GRIDS, PIECES
from tests.worker.vlm_configs import END, PLACE, START

KINDS = {case.kind: case for case in CASES if case.name == "plain"}
AROUND = Around(PIECES[0], (START, PLACE, END), PIECES[3])


@pytest.fixture(params=["qwen2_vl", "dots_ocr"])
def seeing(request: pytest.FixtureRequest, tmp_path: Path) -> Seeing:
    """An engine that keeps prefixes, on a type that turns by axes and on one that does not."""
    case = KINDS[request.param]
    folder, words = case.write(tmp_path / "model"), write_tiny_model(tmp_path / "words")
    return seeing_engine(case, folder, AROUND, tokens_max=9, words=words, context_length=256)


def test_streams_say_what_one_pass_says(seeing: Seeing) -> None:
    """In chunks and steps, behind a former prompt, after one changed value, and resumed from the
    request alone after any token."""
    first, second, _ = seeing.pictures
    placed = seeing.place(first, second)
    expected = seeing.expect(placed)
    whole = seeing.run(placed)
    assert whole.ids == expected
    assert seeing.gallery.seen == 2
    again = seeing.run(placed)
    assert (again.ids, again.reused) == (expected, len(placed.ids) - 1)
    assert seeing.gallery.seen == 2
    changed = seeing.place(change_value(first, by=255), second)
    other = seeing.run(changed)
    assert (other.reused, other.ids) == (len(PIECES[0]) + 1, seeing.expect(changed))
    for cut in (1, 4, 8):
        assert seeing.resume(placed, whole, cut, by_steps=True) == expected


def test_rows_with_images_share_steps_with_text(seeing: Seeing) -> None:
    """Streams side by side, of other shapes and of none, say what each says alone; features are
    counted by name, and no more are kept than may be."""
    first, second, third = seeing.pictures
    prompts = [
        seeing.place(first),
        seeing.place(second, third),
        Placed(PIECES[3], (), ()),
        seeing.place(third, before=(70,)),
    ]
    assert seeing.run_together(prompts) == [seeing.expect(placed) for placed in prompts]
    kept = seeing.gallery.arrays()
    assert len(kept) == 2
    hidden = seeing.gallery.sizes.hidden
    places = {4 * hidden * rows * columns for rows, columns in GRIDS}
    assert {array.nbytes for array in kept.values()} <= places
    seeing.gallery.warm_up()
    assert not seeing.gallery.arrays()
