"""Which tokens steer a chat, and how a user's text is kept from becoming one.

A template mixes its own text, whose control tokens are meant, with what people wrote, where the
same characters are text. So people's texts are marked before they are rendered: digits that no one
can guess go into each spelling of a control token, and where a text could become a part of one
beside others'. Behind the rendering the spellings that are whole are the template's. Each becomes
a private spelling, under which a twin of the tokenizer knows the token; the twin reads the others
as text. Then the digits go. Twins differ in their added tokens alone, and share model and
normaliser, which are the same objects of the library and change no more once they are loaded.

Invariants:
- A control token of a prompt was written by the template, or by an assistant's message that may
  hold it (`allowed`).
- Ids are those of the tokenizer itself for every text in which no person spells a control token:
  the private spelling has its token's own flags.
- Any thread; immutable.
"""

from __future__ import annotations

import bisect
import itertools
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from mlxd_shared.domain.errors import InvalidModel

CONTROL_TOKEN_CHARS_MAX: Final = 128
"""Of any added token of a model that chats."""
_NONCE_DIGITS: Final = 24
_LIKE_CONTROL: Final = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)
"""What no text contains by chance."""


def new_nonce() -> str:
    """Return digits that no one can guess: they survive trimming, quoting and either case."""
    return "".join(secrets.choice("0123456789") for _ in range(_NONCE_DIGITS))


class ControlTokens:
    """The control tokens of one model under its template."""

    def __init__(self, raw: RawTokenizer, *, written: str, named: Collection[str]) -> None:
        """Make the twin, which shares the tokenizer's vocabulary.

        written: the template's source; named: the special tokens that it is given by name.

        Raises:
            InvalidModel: an added token is too long to be one.
        """
        added = raw.get_added_tokens_decoder()
        self.ids: Mapping[str, int] = {
            token.content: token_id
            for token_id, token in added.items()
            if _controls(token, written=written, named=named)
        }
        """The control tokens: the id of each spelling."""
        self.special = frozenset(
            token.content for token in added.values() if token.special and token.content.strip()
        )
        """Spellings of the tokens that are no text in an answer either."""
        prefix = new_nonce()
        self._private = {text: f"\ue000{prefix}{i}\ue001" for i, text in enumerate(self.ids)}
        pattern = _any_of(self.ids)
        self._whole = re.compile(pattern)
        self._spelled = re.compile(pattern, re.IGNORECASE)
        self._beginnings = {text[:n].lower() for text in self.ids for n in range(1, len(text))}
        self._ends = {text[n:].lower() for text in self.ids for n in range(1, len(text))}
        self._longest = max(map(len, self.ids), default=0)
        self._twin, self._back = self._twin_of(raw, {t.content: t for t in added.values()})

    def ids_of(self, spellings: Iterable[str]) -> dict[int, str]:
        """Return the ids, with their spellings, of those that are control tokens."""
        return {self.ids[text]: text for text in spellings if text in self.ids}

    def mark(self, text: str, nonce: str, *, allowed: Collection[str] = ()) -> str:
        """Return a person's text with `nonce` where it would be read as a control token.

        allowed: control tokens that it may hold.
        """
        places = self._edges(text)
        match = self._spelled.search(text)
        while match is not None:
            if match[0] not in allowed:
                places.add(match.start() + 1)
            match = self._spelled.search(text, match.start() + 1)  # one may begin within another
        ends = (0, *sorted(places), len(text))
        return nonce.join(text[begin:end] for begin, end in itertools.pairwise(ends))

    def encode(self, text: str, nonce: str) -> list[int]:
        """Return the ids of a rendered text whose people's parts are marked by `nonce`.

        No token is put before or behind it: the template writes what belongs there.
        """
        pieces = self._pieces(text, nonce)
        ids = self._ids_of_pieces(pieces)
        if sum(token_id in self._back for token_id in ids) != len(pieces) // 2:
            del ids  # a long text's are not held while they are looked for anew
            ids = self._ids_of_pieces(self._legible(pieces))
        back = self._back
        return [back.get(token_id, token_id) for token_id in ids]

    def _ids_of_pieces(self, pieces: list[str]) -> list[int]:
        (encoding,) = self._twin.encode_batch_fast(["".join(pieces)], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _pieces(self, text: str, nonce: str) -> list[str]:
        """Return a rendered text in pieces, every second of them a control token's private one."""
        pieces: list[str] = []
        place = 0
        for match in self._whole.finditer(text):
            pieces += (text[place : match.start()].replace(nonce, ""), self._private[match[0]])
            place = match.end()
        return [*pieces, text[place:].replace(nonce, "")]

    def _legible(self, pieces: list[str]) -> list[str]:
        """Return the pieces with those spelled out that the tokenizer itself takes for text.

        Some tokens are known behind a blank only: those that are looked for in the normal form of a
        text, where that puts blanks before words.
        """
        (encoding,) = self._twin.encode_batch(["".join(pieces)], add_special_tokens=False)
        places = {
            begin: end
            for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if token_id in self._back
        }
        begins = sorted(places)
        spelled = {private: text for text, private in self._private.items()}
        output: list[str] = []
        place = 0
        for index, piece in enumerate(pieces):
            before = bisect.bisect_right(begins, place)
            known = index % 2 == 0 or (before > 0 and place < places[begins[before - 1]])
            output.append(piece if known else spelled[piece])
            place += len(piece)
        return output

    def _edges(self, text: str) -> set[int]:
        """Return the ends of a text that are parts of a control token, blanks around them aside."""
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        most = min(self._longest, max(end - begin, 0)) + 1
        places = set()
        if any(text[end - n : end].lower() in self._beginnings for n in range(1, most)):
            places.add(end)
        if any(text[begin : begin + n].lower() in self._ends for n in range(1, most)):
            places.add(begin)
        return places

    def _twin_of(
        self, raw: RawTokenizer, added: dict[str, AddedToken]
    ) -> tuple[RawTokenizer, dict[int, int]]:
        """Return the tokenizer that knows control tokens by their private spellings alone."""
        twin = twin_of(raw, special=self.ids)
        twin.encode_special_tokens = True  # what is special is text to the twin
        twin.add_tokens(
            [
                copy_of(added[text], content=private, special=False)
                for text, private in self._private.items()
            ]
        )
        back: dict[int, int] = {}
        for text, private in self._private.items():
            token_id = twin.token_to_id(private)
            assert token_id is not None, "it was added just now"
            back[token_id] = self.ids[text]
        return twin, back


def _controls(token: AddedToken, *, written: str, named: Collection[str]) -> bool:
    """Tell whether a token steers: it is special, looks like it, or the template writes it."""
    text = token.content
    if len(text) > CONTROL_TOKEN_CHARS_MAX:
        problem = f"an added token of {len(text)} characters; above {CONTROL_TOKEN_CHARS_MAX}"
        raise InvalidModel(problem, "tokenizer.json", "added_tokens")
    if len(text) < 2 or not text.strip():  # a blank, or a letter: no text does without
        return False
    looks = token.special or text in named or _LIKE_CONTROL.fullmatch(text) is not None
    return looks or text in written


def _any_of(texts: Iterable[str]) -> str:
    """Return the pattern of any of these, the longest first; of nothing where there is none.

    It branches as the texts do, so that thousands of them cost no more than their longest.
    """
    tree: _Branches = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern(tree) or "(?!)"


_Branches = dict[str, "_Branches"]


def _pattern(node: _Branches) -> str:
    ways = [re.escape(char) + _pattern(child) for char, child in node.items() if char]
    if not ways:
        return ""
    joined = ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"
    return f"(?:{joined})?" if "" in node else joined


def twin_of(raw: RawTokenizer, *, special: Collection[str] = ()) -> RawTokenizer:
    """Return a tokenizer that encodes as `raw` does, with its ids; without what comes after.

    special: spellings of added tokens that are special to the twin, whatever they are to `raw`.
    """
    twin = RawTokenizer(raw.model)
    if raw.normalizer is not None:  # before the tokens, which are looked for in its normal form
        twin.normalizer = raw.normalizer
    if raw.pre_tokenizer is not None:
        twin.pre_tokenizer = raw.pre_tokenizer
    added = raw.get_added_tokens_decoder()
    # In the order of their ids, as from a file: what the model lacks is numbered as it comes.
    twin.add_tokens(
        [
            copy_of(token, special=token.special or token.content in special)
            for _, token in sorted(added.items())
        ]
    )
    assert twin.get_added_tokens_decoder().keys() == added.keys(), "ids go by order"
    return twin


def copy_of(token: AddedToken, *, content: str | None = None, special: bool) -> AddedToken:
    """Return an added token that is found as `token` is, spelled otherwise where `content` is."""
    return AddedToken(
        token.content if content is None else content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )
