"""Named keys: who may call what, with which models and how much, as a file says it.

    {"keys": [{"name": "editor", "sha256": "...", "scopes": ["infer"], "models": ["demo"],
               "streams": 4, "requests_per_minute": 60, "tokens_per_minute": 100000}]}

Invariants:
- The file holds hashes, never a key. Keys are drawn from 256 random bits, so a plain SHA-256 keeps
  them: there is nothing to guess that a salt or a slow hash would protect.
- A name, a hash and every limit are checked when the file is read; what is wrong names its place.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from mlxd_shared import config
from mlxd_shared.domain.errors import BadCredentials, InvalidRequest, NotAllowed

PREFIX: Final = "mlxd-"
"""What every key begins with, so that scanners of repositories know one when they see it."""
_RANDOM_BYTES: Final = 32
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{config.KEY_NAME_CHARS_MAX - 1}}}")
_HASH = re.compile(r"[0-9a-f]{64}")
LIMITS: Final = ("streams", "requests_per_minute", "tokens_per_minute")


class Scope(StrEnum):
    """What a key is for."""

    INFER = "infer"
    """Generate, embed and the like; a model that is needed for it is loaded."""
    OBSERVE = "observe"
    """Status, metrics and what models there are."""
    MANAGE = "manage"
    """Load, unload and forget models."""


@dataclass(frozen=True, slots=True)
class Key:
    """One entry. A limit that is None is none; `models` empty means all."""

    name: str
    sha256: str = field(repr=False)
    scopes: frozenset[Scope] = frozenset({Scope.INFER})
    models: frozenset[str] = frozenset()
    streams: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def check_model(self, *names: str) -> None:
        """Refuse a model, which is known by `names`, that the key is not for.

        Raises:
            NotAllowed: none of the names is among its models; says the first one.
        """
        if self.models and self.models.isdisjoint(names):
            raise NotAllowed(self.name, f"the model {names[0]!r}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose call it is. `key` None: the operator's own, or anybody's where no key is needed."""

    key: Key | None = None

    def may(self, scopes: frozenset[Scope]) -> bool:
        """Return whether one of `scopes` is the caller's."""
        return self.key is None or not scopes.isdisjoint(self.key.scopes)


ANYBODY: Final = Caller()


class KeyRing:
    """All keys of a file, by their hashes."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        """Keep keys that `parse` has checked."""
        self._by_hash: Mapping[str, Key] = MappingProxyType({key.sha256: key for key in keys})

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys, in the file's order."""
        return tuple(self._by_hash.values())

    def find(self, secret: str) -> Key | None:
        """Return the key that `secret` is; None: none of them.

        A look-up by hash tells an attacker nothing: who could make hashes that begin alike would
        have broken SHA-256.
        """
        return self._by_hash.get(hash_of(secret))


def hash_of(secret: str) -> str:
    """Return what a file keeps of a key: its SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def make_secret() -> str:
    """Return a new key, which nobody can guess."""
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def parse_keys(content: bytes, *, file: str) -> KeyRing:
    """Return the keys that a file holds.

    Raises:
        BadCredentials: it is not of this form; names the entry, its field and the limit.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise BadCredentials(file, "is not JSON") from None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or set(document) != {"keys"}:
        raise BadCredentials(file, 'is not an object with a list "keys"')
    if len(entries) > config.KEYS_MAX:
        raise BadCredentials(file, f"holds {len(entries)} keys, at most {config.KEYS_MAX}")
    keys: list[Key] = []
    for index, entry in enumerate(entries):
        key = _parse_key(entry, file, f"keys[{index}]")
        if any(key.name == other.name or key.sha256 == other.sha256 for other in keys):
            raise BadCredentials(file, f"keys[{index}]: there is another of its name or hash")
        keys.append(key)
    return KeyRing(keys)


def describe_keys(keys: Iterable[Key]) -> dict[str, object]:
    """Return a file's content with these keys; limits that are not set are left out."""
    entries = []
    for key in keys:
        values = asdict(key) | {"scopes": sorted(key.scopes), "models": sorted(key.models)}
        entries.append({name: value for name, value in values.items() if value not in (None, [])})
    return {"keys": entries}


def check_key(key: Key) -> None:
    """Refuse a key whose values are beyond their limits.

    Raises:
        InvalidRequest: names the field and the limit.
    """
    if not _NAME.fullmatch(key.name):
        limit = f"1 to {config.KEY_NAME_CHARS_MAX} letters, digits or ._-, not a sign first"
        raise InvalidRequest.of("name", f"is not {limit}")
    if not _HASH.fullmatch(key.sha256):
        raise InvalidRequest.of("sha256", "is not 64 hexadecimal digits in lower case")
    if not key.scopes:
        raise InvalidRequest.of("scopes", f"is not one or more of {', '.join(Scope)}")
    if len(key.models) > config.KEY_MODELS_MAX or not all(key.models):
        raise InvalidRequest.of("models", f"is not 0 to {config.KEY_MODELS_MAX} names")
    for name in LIMITS:
        value = getattr(key, name)
        if value is not None and not 1 <= value <= config.KEY_LIMIT_MAX:
            raise InvalidRequest.of(name, f"is not 1 to {config.KEY_LIMIT_MAX}")


def _parse_key(entry: object, file: str, place: str) -> Key:
    if not isinstance(entry, dict):
        raise BadCredentials(file, f"{place} is not an object")
    for name, value in entry.items():
        kind = _KINDS.get(name)
        if kind is None:
            raise BadCredentials(file, f"{place}.{name:.50} is not a field of a key")
        if type(value) is not kind or (isinstance(value, list) and {*map(type, value)} - {str}):
            raise BadCredentials(file, f"{place}.{name} is of another type")
    scopes = entry.get("scopes", [Scope.INFER])
    if not set(scopes) <= set(Scope):
        raise BadCredentials(file, f"{place}.scopes are not of {', '.join(Scope)}")
    key = Key(
        entry.get("name", ""),
        entry.get("sha256", ""),
        scopes=frozenset(map(Scope, scopes)),
        models=frozenset(entry.get("models", [])),
        **{limit: entry.get(limit) for limit in LIMITS},
    )
    try:
        check_key(key)
    except InvalidRequest as error:
        (violation,) = error.violations
        raise BadCredentials(file, f"{place}.{violation.field} {violation.description}") from None
    return key


_KINDS: Final[Mapping[str, type]] = {
    "name": str,
    "sha256": str,
    "scopes": list,  # of texts, and so are the models
    "models": list,
    **dict.fromkeys(LIMITS, int),
}
