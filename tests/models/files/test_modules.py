"""Whether a model's files say how its texts become vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxd_models.files.modules import has_pooling

PREFIX = "sentence_transformers."
TRANSFORMER = {"path": "", "type": f"{PREFIX}base.modules.transformer.Transformer"}
POOLING = {"path": "1_Pooling", "type": f"{PREFIX}models.Pooling"}
SCORE = {"path": "1_LogitScore", "type": f"{PREFIX}cross_encoder.modules.logit_score.LogitScore"}


@pytest.mark.parametrize(
    ("modules", "there", "expected"),
    [
        (None, False, False),
        (None, True, True),
        ([TRANSFORMER, POOLING], True, True),
        ([TRANSFORMER, SCORE], False, False),
        ([TRANSFORMER], True, False),
        ("nonsense", True, False),
    ],
)
def test_the_modules_say_it(tmp_path: Path, modules: Any, there: bool, expected: bool) -> None:
    """The list of modules first; without one, the pooling's own file; a bad list says nothing."""
    if modules is not None:
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    if there:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    assert has_pooling(tmp_path) is expected
