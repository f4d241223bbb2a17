"""Named keys: what a file may say, and what is wrong with it by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_shared import config
from mlxd_shared.domain.errors import BadCredentials
from mlxd_shared.security.keys import (
    LIMITS,
    PREFIX,
    Key,
    KeyRing,
    Scope,
    describe_keys,
    hash_of,
    make_secret,
    parse_keys,
)

HASH = "a" * 64
GOOD = {"name": "editor", "sha256": HASH}
LIMIT_VALUES = st.none() | st.integers(1, config.KEY_LIMIT_MAX)
KEYS = st.builds(
    Key,
    name=st.from_regex(r"[a-z0-9][a-zA-Z0-9._-]{0,63}", fullmatch=True),
    sha256=st.binary(max_size=9).map(lambda raw: hash_of(raw.hex())),
    scopes=st.frozensets(st.sampled_from(Scope), min_size=1),
    models=st.frozensets(st.text(st.characters(codec="utf-8"), min_size=1), max_size=3),
    **dict.fromkeys(LIMITS, LIMIT_VALUES),
)


@given(st.lists(KEYS, max_size=5, unique_by=(lambda key: key.name, lambda key: key.sha256)))
def test_what_is_written_is_read(keys: list[Key]) -> None:
    """Every key comes back with its scopes, models and limits, in the same order."""
    assert parse_keys(json.dumps(describe_keys(keys)).encode(), file="f").keys == tuple(keys)


def test_only_infer_is_given_away_unasked() -> None:
    """A key that says nothing of scopes may generate, and neither look around nor manage."""
    (key,) = parse_keys(json.dumps({"keys": [GOOD]}).encode(), file="f").keys
    assert key == Key("editor", HASH, scopes=frozenset({Scope.INFER}))


WRONG: list[tuple[Any, str]] = [
    ([], 'is not an object with a list "keys"'),
    ({"keys": {}}, 'is not an object with a list "keys"'),
    ({"keys": [], "more": 1}, 'is not an object with a list "keys"'),
    ({"keys": [1]}, "keys[0] is not an object"),
    ({"keys": [GOOD | {"secret": "x"}]}, "keys[0].secret is not a field"),
    ({"keys": [GOOD | {"name": ""}]}, "keys[0].name is not 1 to 64 letters"),
    ({"keys": [GOOD | {"name": "a b"}]}, "keys[0].name is not"),
    ({"keys": [GOOD | {"name": "n" * 65}]}, "keys[0].name is not"),
    ({"keys": [GOOD | {"name": 1}]}, "keys[0].name is of another type"),
    ({"keys": [GOOD | {"sha256": HASH.upper()}]}, "keys[0].sha256 is not 64"),
    ({"keys": [{"name": "a"}]}, "keys[0].sha256 is not 64"),
    ({"keys": [GOOD | {"scopes": []}]}, "keys[0].scopes is not one or more"),
    ({"keys": [GOOD | {"scopes": ["all"]}]}, "keys[0].scopes are not of infer, observe, manage"),
    ({"keys": [GOOD | {"models": [""]}]}, "keys[0].models is not 0 to 100 names"),
    ({"keys": [GOOD | {"models": ["m"] + [f"m{i}" for i in range(100)]}]}, "keys[0].models"),
    ({"keys": [GOOD | {"streams": 0}]}, "keys[0].streams is not 1 to"),
    ({"keys": [GOOD | {"streams": True}]}, "keys[0].streams is of another type"),
    ({"keys": [GOOD | {"tokens_per_minute": 10**10}]}, "keys[0].tokens_per_minute is not 1 to"),
    ({"keys": [GOOD, GOOD | {"name": "other"}]}, "keys[1]: there is another"),
    ({"keys": [GOOD, GOOD | {"sha256": "b" * 64}]}, "keys[1]: there is another"),
    ({"keys": [GOOD] * 1001}, "holds 1001 keys, at most 1000"),
]


@pytest.mark.parametrize(("document", "problem"), WRONG)
def test_what_is_wrong_is_named(document: object, problem: str) -> None:
    """The entry, its field and the limit; the hash is in no message."""
    with pytest.raises(BadCredentials) as caught:
        parse_keys(json.dumps(document).encode(), file="keys.json")
    assert problem in caught.value.problem
    assert HASH not in caught.value.describe()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(content: bytes) -> None:
    """Half a file, no text, nested without end."""
    with pytest.raises(BadCredentials, match="is not JSON"):
        parse_keys(content, file="keys.json")


def test_a_key_is_known_by_its_secret_alone() -> None:
    """Neither its hash nor another secret opens anything, and no key prints its hash."""
    secret = make_secret()
    key = Key("editor", hash_of(secret))
    ring = KeyRing([key])
    assert secret.startswith(PREFIX)
    assert ring.find(secret) is key
    assert [ring.find(other) for other in ("", key.sha256, secret[:-1], make_secret())] == [
        None
    ] * 4
    assert key.sha256 not in repr(key)
