"""Models that have a tower, and no file that says how images are made ready: their text alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_models.describe import describe
from mlxd_models.files.image_settings import IMAGE_FILE
from mlxd_models.fit.described import facts_of
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.models.base import Sighted
from tests.support.seeing_models import SEEING
from tests.support.shown import Shown, logits_in_pieces
from tests.worker.tiny import caches_of, difference, load

TEXT = (9, 8, 7, 21, 22, 55, 3, 2, 80)


@pytest.mark.parametrize("kind", SEEING)
def test_the_text_is_that_of_the_whole(kind: str, tmp_path: Path) -> None:
    """Its tower stays unread, and is no need; the missing file is named where images are asked
    for."""
    folder = SEEING[kind](tmp_path / "model")
    seeing, sees = load(folder), describe(folder)
    (folder / IMAGE_FILE).unlink()
    blind, reads = load(folder), describe(folder)

    assert isinstance(seeing, Sighted)
    assert not isinstance(blind, Sighted)
    both = [
        logits_in_pieces(model, caches_of(model), Shown(TEXT), [len(TEXT)])
        for model in (seeing, blind)
    ]
    assert difference(*both) < 1e-5
    assert (sees.unseeing, sees.footprint.sight is None) == ("", False)
    assert reads.footprint.sight is None
    assert IMAGE_FILE in reads.unseeing
    facts = facts_of(reads)
    assert facts.unseeing == reads.unseeing
    assert facts.elements < facts_of(sees).elements
    assert facts.stored_bytes - facts.dropped_bytes == 4 * facts.elements


@pytest.mark.parametrize("kind", SEEING)
def test_a_file_that_is_broken_is_no_file_that_is_missing(kind: str, tmp_path: Path) -> None:
    """It is refused by its name: whoever wrote it meant the model to see."""
    folder = SEEING[kind](tmp_path / "model")
    (folder / IMAGE_FILE).write_text("{")
    with pytest.raises(InvalidModel) as caught:
        describe(folder)
    assert caught.value.file == IMAGE_FILE
