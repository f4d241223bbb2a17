"""Random outputs under a constraint, and a judge of JSON that knows nothing of the compiler.

The judge is python-jsonschema in the schema's own draft, with two parts made stricter: patterns are
matched by an ECMA-262 engine, and numbers are read as decimals, so that nothing is rounded.
"""

from __future__ import annotations

import decimal
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jsonschema
import numpy as np
from check_jsonschema.formats import FormatOptions, make_format_checker
from check_jsonschema.regex_variants import RegexImplementation, RegexVariantName

from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.text.tokenizer import Tokenizer
from tests.support.ecma import finds

WALK_TOKENS_MAX: Final = 400
WANDER_TOKENS: Final = 60
"""So long a walk takes any token; then it heads for the end."""
_ENDINGS: Final = (b'"', b"}", b"]", b":", b",", b"0", b"1", b"e", b"l", b"s")
_SIGNS: Final = tuple(b'"\\.-+eEu/') + tuple(b"0123456789")
"""What such a token begins with is tried more often: most mistakes are about them."""
_CONTEXT: Final = decimal.Context(
    prec=5000, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[decimal.InvalidOperation]
)


@dataclass(frozen=True, slots=True)
class Walker:
    """Walks at random through what a constraint allows."""

    pieces: Mapping[int, bytes]
    endings: tuple[int, ...]
    signs: frozenset[int]
    """Tokens that begin with one of `_SIGNS`."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Walker:
        """Return a walker with the tokens of `tokenizer`."""
        pieces = tokenizer.pieces()
        by_bytes = {piece: token_id for token_id, piece in pieces.items()}
        endings = tuple(by_bytes[end] for end in _ENDINGS if end in by_bytes)
        signs = frozenset(i for i, piece in pieces.items() if piece and piece[0] in _SIGNS)
        return cls(pieces, endings, signs)

    def walk(self, constraint: Constraint, rng: random.Random) -> bytes | None:
        """Return one complete output; None where it grew too long.

        Its tokens are drawn evenly, every fourth of those with signs where there are any.
        """
        matcher = constraint.start()
        output: list[bytes] = []
        for step in range(WALK_TOKENS_MAX):
            if matcher.native.is_accepting() and (matcher.is_over or rng.random() < 0.5):
                return b"".join(output)
            words = np.frombuffer(matcher.mask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(words, bitorder="little"))
            token_id = self._next(allowed, rng, hurry=step >= WANDER_TOKENS)
            if token_id is None:
                return b"".join(output)  # nothing but an end of sequence
            output.append(self.pieces[token_id])
            matcher.accept(token_id)
        return None

    def _next(self, allowed: np.ndarray, rng: random.Random, *, hurry: bool) -> int | None:
        known = set(allowed.tolist()) if hurry else frozenset()
        if hurry and rng.random() < 0.9:
            for token_id in self.endings:
                if token_id in known:
                    return token_id
        if rng.random() < 0.25:
            some = sorted(self.signs.intersection(allowed.tolist()))
            if some:
                return rng.choice(some)
        for _ in range(8):
            token_id = int(allowed[rng.randrange(len(allowed))])
            if token_id in self.pieces:
                return token_id
        return next((i for i in allowed.tolist() if i in self.pieces), None)


class Judge:
    """Tells whether a value matches a schema, by python-jsonschema."""

    def __init__(self, schema: Any) -> None:
        """Read the schema in the draft that it names."""
        exact = json.loads(json.dumps(schema), parse_float=decimal.Decimal)
        base = jsonschema.validators.validator_for(schema)
        checker = make_format_checker(
            FormatOptions(regex_impl=RegexImplementation(RegexVariantName.default))
        )
        validator_type = jsonschema.validators.extend(base, _STRICTER)
        self._validator = validator_type(exact, format_checker=checker)

    def problems(self, text: bytes) -> list[str]:
        """Return what is wrong with a text; nothing where it is JSON that matches."""
        try:
            value = json.loads(text.decode(), parse_float=_CONTEXT.create_decimal)
        except ValueError as error:
            return [f"no JSON: {error}"]
        with decimal.localcontext(_CONTEXT):
            errors: Iterator[Any] = self._validator.iter_errors(value)
            return [f"{error.json_path}: {error.message[:200]}" for error in errors]

    def accepts(self, value: Any) -> bool:
        """Tell whether a value matches."""
        return not self.problems(json.dumps(value).encode())


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[Any]:
    if isinstance(instance, str) and not finds(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, _: Any
) -> Iterator[Any]:
    if isinstance(instance, dict):
        for pattern, inner in patterns.items():
            for name, value in instance.items():
                if finds(pattern, name):
                    yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, inner: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[Any]:
    if isinstance(instance, dict):
        patterns = schema.get("patternProperties", ())
        for name, value in instance.items():
            if name in schema.get("properties", ()) or any(finds(p, name) for p in patterns):
                continue
            if inner is False:
                yield jsonschema.ValidationError(f"{name!r} is one too many")
            elif inner is not True:
                yield from validator.descend(value, inner, path=name)


_STRICTER: Final = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
}
