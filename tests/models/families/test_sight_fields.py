"""What configs of models that see say alike: by any of a key's names, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.sight_fields import check_colours, place_token
from mlxd_shared.domain.errors import InvalidModel

NAMES = ("image_token_id", "image_token_index")


@pytest.mark.parametrize(
    ("stated", "token_id"),
    [({}, 7), (dict.fromkeys(NAMES), 7), ({NAMES[0]: 3}, 3), ({NAMES[1]: 4}, 4),
     (dict.fromkeys(NAMES, 0), 0)],
)  # fmt: skip
def test_a_token_has_several_names(stated: dict[str, Any], token_id: int) -> None:
    """One of them is enough; where none is stated the default counts."""
    assert place_token(Fields(stated), *NAMES, vocab=8, default=7) == token_id


@pytest.mark.parametrize(
    ("stated", "default", "field"),
    [({}, None, NAMES[0]), ({}, 8, NAMES[0]), ({NAMES[1]: 8}, None, NAMES[0]),
     ({NAMES[0]: 3, NAMES[1]: 4}, 7, NAMES[1]), ({NAMES[1]: -1}, 7, NAMES[1])],
)  # fmt: skip
def test_a_token_that_is_none_is_refused(
    stated: dict[str, Any], default: int | None, field: str
) -> None:
    """Missing, beyond the vocabulary, below it, or another by its other name."""
    with pytest.raises(InvalidModel) as caught:
        place_token(Fields(stated), *NAMES, vocab=8, default=default)
    assert caught.value.field == field


def test_colours_are_three_by_any_name() -> None:
    """The name that says otherwise is named, with the part that it is in."""
    check_colours(Fields({"a": 3, "b": None}), "a", "b", "c")
    with pytest.raises(InvalidModel) as caught:
        check_colours(Fields({"a": 3, "b": 1}, "vision_config."), "a", "b")
    assert caught.value.field == "vision_config.b"
