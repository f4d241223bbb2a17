"""Names that are no model's own: digests cut short, and what somebody may have meant."""

from __future__ import annotations

import pytest

from mlxd_controller.store.naming import beginning_of_digest, hint_for, is_repository


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("0123456789ab", "0123456789ab"),
        ("sha256:0123456789abc", "0123456789abc"),
        ("f" * 64, "f" * 64),
        ("f" * 65, None),
        ("0123456789a", None),
        ("0123456789AB", None),
        ("sha256:", None),
        ("", None),
    ],
)
def test_a_digest_may_be_cut_short(name: str, beginning: str | None) -> None:
    """To twelve digits, with its kind or without; nothing else is one."""
    assert beginning_of_digest(name) == beginning


def test_a_repository_is_two_parts_and_maybe_a_revision() -> None:
    """No path, and no name of one part."""
    assert is_repository("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert is_repository("o/m@refs/pr/1")
    for name in ("m", "/o/m", "a/b/c", "./m", "o/", "~/m", "o/m@"):
        assert not is_repository(name)


def test_a_few_names_are_named() -> None:
    """However many come near, or there are."""
    many = [f"model-{number:03}" for number in range(100)]

    assert (
        hint_for("model", many, pulls=False) == "did you mean model-000 or model-001 or model-002?"
    )
    assert hint_for("x", many, pulls=False).count(",") == 7
