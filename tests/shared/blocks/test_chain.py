"""A block's name stands for all that its bytes depend on, and for nothing else."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_shared.blocks.chain import NAME_NBYTES, Form, name_of_form, names_of
from tests.support.effort import SAME_EACH_TIME, examples

FORM = Form("d" * 64, "auto F32", 8192, "cpu", "mlx 1", ("standard F32[1]", ""), 4)
CHANGES: dict[str, Any] = {
    "model_digest": "e" * 64,
    "weights": "auto BF16",
    "context_length": 4096,
    "device": "cuda",
    "library": "mlx 2",
    "layers": ("standard F32[1]",),
    "block_tokens": 8,
    "arithmetic": 2,
}
TOKEN_RUNS = st.lists(st.integers(0, 3), max_size=24)


def key_of(tokens: list[int]) -> bytes:
    """Return tokens as names are made of them."""
    return b"".join(token.to_bytes(4, "little") for token in tokens)


@pytest.mark.parametrize("field", [field.name for field in fields(Form)])
def test_every_field_of_a_form_counts(field: str) -> None:
    """Another model, rotation, device, library, kind of layer, or size: other names."""
    other = replace(FORM, **{field: CHANGES[field]})

    assert len(name_of_form(FORM)) == NAME_NBYTES
    assert name_of_form(other) != name_of_form(FORM)
    tokens = key_of([1, 2, 3, 4])
    assert names_of(name_of_form(other), tokens, block_tokens=4) != names_of(
        name_of_form(FORM), tokens, block_tokens=4
    )


def test_no_two_forms_are_one_text() -> None:
    """Where one layer's text ends and the next begins is part of the name."""
    split = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc")]

    assert len({name_of_form(replace(FORM, layers=layers)) for layers in split}) == len(split)


@settings(max_examples=examples(200), deadline=None, derandomize=SAME_EACH_TIME)
@given(TOKEN_RUNS, TOKEN_RUNS)
def test_names_agree_exactly_as_far_as_prompts_do(one: list[int], two: list[int]) -> None:
    """Two prompts share the names of the blocks in which all tokens up to the end are equal."""
    names = [names_of(b"f" * 32, key_of(tokens), block_tokens=4) for tokens in (one, two)]

    for tokens, named in zip((one, two), names, strict=True):
        assert len(named) == len(tokens) // 4
    for depth, (first, second) in enumerate(zip(*names, strict=False)):
        stop = 4 * (depth + 1)
        assert (first == second) == (one[:stop] == two[:stop])


@settings(max_examples=examples(50), deadline=None, derandomize=SAME_EACH_TIME)
@given(TOKEN_RUNS)
def test_a_block_has_one_name_in_one_place(tokens: list[int]) -> None:
    """The same tokens further on have another name."""
    names = names_of(b"f" * 32, key_of([*tokens, *tokens, *tokens]), block_tokens=1)

    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("tokens", "block_tokens"), [(b"abc", 4), (b"abcd", 0), (b"abcd", -1)])
def test_what_is_no_tokens_is_refused(tokens: bytes, block_tokens: int) -> None:
    """Bytes that are no whole tokens, and blocks without any."""
    with pytest.raises(ValueError, match="tokens"):
        names_of(b"f" * 32, tokens, block_tokens=block_tokens)
