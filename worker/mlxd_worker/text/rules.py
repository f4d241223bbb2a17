"""What a tokenizer.json may cost: refused if absurd, tried first if it cannot be foreseen.

A tokenizer is data that came with a model, and the library runs it as it is: a normaliser that
makes a thousand letters of one, twice, or a pattern that looks at a text over and over. What it
says is looked at before the library reads it, which already runs some of it.

Invariants:
- What is `plain` takes time in proportion to a text, and memory of at most
  TOKENIZER_GROWTH_SHORT_MAX times its bytes. Every tokenizer that is in wide use is.
- What is `modest` takes memory of at most TOKENIZE_HERE_GROWTH_MAX times a long text's bytes.
- What is not plain is served, by a process that can be killed, however short the text.
- What would be run where it cannot be killed, or grows a text beyond all use, is refused by name.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel

FILE: Final = "tokenizer.json"
_STEPS: Final = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}
"""The parts that are made of steps, and under which key a sequence lists them."""
_READ: Final = frozenset(
    {
        *_STEPS, *_STEPS.values(), "model", "type", "pattern", "Regex", "String", "content",
        "prepend", "precompiled_charsmap", "single", "replacement", "vocab", "added_tokens",
    }
)  # fmt: skip
_PLAIN: Final = frozenset(
    {
        "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt",
        "Precompiled", "Prepend", "Replace", "Strip", "StripAccents",
        "BertPreTokenizer", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Split",
        "UnicodeScripts", "Whitespace", "WhitespaceSplit",
        "BPEDecoder", "ByteFallback", "CTC", "Fuse", "WordPiece",
        "BertProcessing", "RobertaProcessing", "TemplateProcessing",
    }
)  # fmt: skip
"""Steps that look at each character a bounded number of times."""
_GROWTH: Final = {
    "ByteLevel": 3, "NFC": 3, "NFD": 4, "NFKC": 11, "NFKD": 11, "Lowercase": 3, "BertNormalizer": 4,
    "Metaspace": 4,
}  # fmt: skip
"""The most bytes that these make of one: by Unicode's tables, and by a blank before each piece."""

_WORD: Final = r"[^\r\n\p{L}\p{N}]?"
_SHORT: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BLANKS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_AND_SLASHES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_DEEPSEEK: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LINEAR: Final = frozenset(
    {
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(
            rf"{_SHORT}|{_WORD}{letters}+|{digits}|{marks}|{_BLANKS}"
            for digits in (r"\p{N}", r"\p{N}{1,3}")
            for letters, marks in (
                (r"\p{L}", _MARKS),
                (r"[\p{L}\p{M}]", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
            )
        ),
        *(
            f"{_WORD}[{_UPPER}]*[{_LOWER}]+{short}|{_WORD}[{_UPPER}]+[{_LOWER}]*{short}|{digits}"
            f"|{_MARKS_AND_SLASHES}|{_BLANKS}"
            for short in ("", f"{_SHORT}?")
            for digits in (r"\p{N}", r"\p{N}{1,3}")
        ),
        _DEEPSEEK,
        r"\p{N}", r"\p{N}{1,3}", r"\s+", " {2,}", r"\n+",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff\\r\\n]+", "[\r\n]", "\\s?\\p{L}+", "\\s?\\p{P}+",
    }
)  # fmt: skip
"""Expressions of tokenizers in wide use, that scan a text once. The cost of others is unknown."""


def read_settings(content: bytes, *, file: str = FILE) -> dict[str, Any]:
    """Parse a tokenizer.json; raises InvalidModel, with the file, if it is invalid."""
    try:
        settings = json.loads(content, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"is not a tokenizer: {error}", file) from error
    if not isinstance(settings, dict):
        raise InvalidModel("is not a tokenizer: not a JSON object", file)
    return settings


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; duplicate keys are refused among those read here."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        for name in _READ & members.keys():
            if names.count(name) > 1:
                message = f"{name!r} occurs twice in one object"
                raise ValueError(message)
    return members


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a tokenizer costs, by its file."""

    is_plain: bool
    """Whether a text of known length takes a known time."""
    is_modest: bool
    """Whether it takes known memory, too, however long the text."""
    piece_chars_max: int | None
    """The longest spelling in its vocabulary; None: only the library knows."""


def check_tokenizer(settings: Mapping[str, Any], *, file: str = FILE) -> Judgement:
    """Return what a tokenizer costs; raises InvalidModel, with the field, for one not to run."""
    plain, grown = True, 1
    for part in _STEPS:
        steps = list(_steps(settings.get(part), part, file))
        if len(steps) > config.TOKENIZER_STEPS_MAX:
            problem = f"{len(steps)} steps; at most {config.TOKENIZER_STEPS_MAX}"
            raise InvalidModel(problem, file, part)
        growth = 1
        for step in steps:
            grows = _growth(step, part, file)
            growth *= grows
            if part in _BEFORE_MODEL and step.get("type") != "Prepend":  # once, before it all
                grown *= grows
            plain = plain and _is_plain(step, part)
            if growth > config.TOKENIZER_GROWTH_MAX:
                problem = f"may make a text over {config.TOKENIZER_GROWTH_MAX} times as long"
                raise InvalidModel(problem, file, part)
            if part == "decoder" and _pattern(step, "Regex") is not None:
                raise InvalidModel("an expression in a decoder is not served", file, part)
        if part != "post_processor":
            plain = plain and growth <= config.TOKENIZER_GROWTH_SHORT_MAX
    plain = plain and _is_plain_model(settings.get("model"))
    longest = _longest_spelling(settings)
    short = longest is not None and longest <= config.TOKENIZE_HERE_PIECE_CHARS_MAX
    modest = plain and short and grown <= config.TOKENIZE_HERE_GROWTH_MAX
    return Judgement(is_plain=plain, is_modest=modest, piece_chars_max=longest)


_BEFORE_MODEL: Final = ("normalizer", "pre_tokenizer")
"""The parts that a text goes through before the model sees it."""


def _longest_spelling(settings: Mapping[str, Any]) -> int | None:
    """Return the longest of the vocabulary and the added tokens, without another look-up."""
    model = settings.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = settings.get("added_tokens")
    try:
        if isinstance(vocabulary, dict):
            longest = max(map(len, vocabulary), default=1)
        else:
            longest = max((len(spelled) for spelled, _ in vocabulary or ()), default=1)
        return max([longest, *(len(token["content"]) for token in added or ())])
    except (TypeError, ValueError, KeyError):
        return None  # none of the forms that are known: the library's to refuse


def _steps(content: object, part: str, file: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part, sequences taken apart; what is none is the library's to refuse."""
    todo = [content]
    seen = 0
    while todo:
        step = todo.pop()
        seen += 1
        if seen > 2 * config.TOKENIZER_STEPS_MAX:
            raise InvalidModel(f"over {config.TOKENIZER_STEPS_MAX} steps", file, part)
        if not isinstance(step, dict):
            continue
        if not isinstance(step.get("type"), str):  # the library would guess it
            raise InvalidModel("a step without a type", file, part)
        inner = step.get(_STEPS[part])
        if step["type"] == "Sequence" and isinstance(inner, list):
            todo += inner[::-1]
        else:
            yield step


def _is_plain(step: Mapping[str, Any], part: str) -> bool:
    pattern = _pattern(step, "Regex")
    known = pattern is None or pattern in LINEAR
    return known and (step.get("type") in _PLAIN or part == "post_processor")


def _is_plain_model(model: object) -> bool:
    """Tell whether a model looks at a text once; a type that is not named is told by its fields."""
    if not isinstance(model, dict):
        return False
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    short = all(len(str(model.get(key) or "")) <= _AFFIX_CHARS_MAX for key in affixes)
    longest = model.get("max_input_chars_per_word")
    bounded = longest is None or (isinstance(longest, int) and longest <= _WORD_CHARS_MAX)
    return short and bounded and "dropout" not in {k for k, v in model.items() if v}


_AFFIX_CHARS_MAX: Final = 16
_WORD_CHARS_MAX: Final = 256


def _growth(step: Mapping[str, Any], part: str, file: str) -> int:
    """Return how many bytes a step makes of one at most."""
    kind = str(step.get("type"))
    match kind:
        case "Replace":
            growth = _growth_of_replacing(step, part, file)
        case "Prepend":
            growth = 1 + _nbytes(step.get("prepend"))
        case "Precompiled":
            growth = _longest_of(step.get("precompiled_charsmap"), part, file)
        case "Metaspace":
            growth = 1 + _nbytes(step.get("replacement"))
        case "CTC":
            growth = max(_nbytes(value) for value in step.values())
        case "TemplateProcessing":
            _check_template(step.get("single"), part, file)
            growth = 1
        case _:
            growth = 1
    return max(growth, _GROWTH.get(kind, 1))


def _growth_of_replacing(step: Mapping[str, Any], part: str, file: str) -> int:
    content = _nbytes(step.get("content"))
    literal = _pattern(step, "String")
    if literal is None:  # an expression that is not known may be found between any two characters
        return content + (_pattern(step, "Regex") not in LINEAR)
    if not literal:
        raise InvalidModel("replaces an empty text", file, part)
    return -(-content // _nbytes(literal))


def _check_template(single: object, part: str, file: str) -> None:
    """Refuse a template that holds the text more than once, or too many tokens around it."""
    pieces = single if isinstance(single, list) else []
    if len(pieces) > config.TOKENIZER_STEPS_MAX:
        limit = f"{len(pieces)} pieces; at most {config.TOKENIZER_STEPS_MAX}"
        raise InvalidModel(limit, file, f"{part}.single")
    texts = sum("Sequence" in piece for piece in pieces if isinstance(piece, dict))
    if texts > 1:
        raise InvalidModel(f"holds the text {texts} times", file, f"{part}.single")


def _longest_of(charsmap: object, part: str, file: str) -> int:
    """Return the longest text of SentencePiece's table, which holds them behind one another."""
    try:
        table = base64.b64decode(charsmap if isinstance(charsmap, str) else "", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidModel(f"no table: {error}", file, f"{part}.precompiled_charsmap") from error
    begin = 4 + int.from_bytes(table[:4], "little")
    return max(1, *map(len, table[begin:].split(b"\0")))


def _pattern(step: Mapping[str, Any], kind: str) -> str | None:
    pattern = step.get("pattern")
    value = pattern.get(kind) if isinstance(pattern, dict) else None
    return value if isinstance(value, str) else None


def _nbytes(text: object) -> int:
    return len(text.encode(errors="replace")) if isinstance(text, str) else 0
