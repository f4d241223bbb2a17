"""A model's tokenizer: text to ids, ids to text, and which ids begin and end a text.

Invariants
- Text that a user wrote stays text: it never turns into special tokens unless the caller asks.
- A text begins with at most one BOS.
- Encoding and decoding are safe from any thread; a `Detokenizer` belongs to one stream.
- Neither keeps the interpreter's lock, however long the text: the library gives it back for a
  batch, of one here, but not for a single text.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from tokenizers import Encoding
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import DecodeStream

from mlxd_shared.domain.errors import InvalidModel, MlxdError
from mlxd_worker.text.control_tokens import ControlTokens, twin_of
from mlxd_worker.text.spelling import UnknownDecoder, spelling

HELD_TOKENS_MAX: Final = 16
"""Tokens held back for want of one more whole character; a longer run is no text and is given out
as it is."""

NORMALISED_CHARS_MAX: Final = 4
"""Characters that a tokenizer may make one of before it splits a text: a letter and its accents."""

NOTHING_SHOWN: Final[Mapping[int, str]] = MappingProxyType({})

_TAIL_TOKENS: Final = 3
"""An unfinished character has at most three of its four bytes, so at most three tokens."""

_PANIC: Final = "PanicException"
"""The class that the library does not export."""

_REPLACEMENT: Final = "\ufffd"
"""What stands in a decoded text for bytes that are no character, or not yet."""


@contextmanager
def library_faults(problem: str, file: str = "tokenizer.json") -> Iterator[None]:
    """Turn an error of the library, which its file has caused, into one that names the file.

    The library raises a bare Exception or, after a panic, a BaseException of its own; it remains
    usable even then.

    Raises:
        InvalidModel: the body failed.
    """
    try:
        yield
    except MlxdError:
        raise
    except Exception as error:
        raise InvalidModel(f"{problem}: {error}", file) from error
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise InvalidModel(f"{problem}: {error}", file) from error


def read_raw(content: bytes) -> RawTokenizer:
    """Return the library's tokenizer of a tokenizer.json; raises what the library does."""
    raw = RawTokenizer.from_buffer(content)
    raw.no_truncation()  # limits left over from training would cut prompts in silence
    raw.no_padding()
    return raw


class Tokenizer:
    """What the worker needs of a tokenizer; immutable, any thread."""

    def __init__(
        self,
        raw: RawTokenizer,
        *,
        bos_id: int | None,
        add_bos: bool | None,
        eos_ids: tuple[int, ...],
        content: bytes | None = None,
        is_plain: bool = True,
        is_modest: bool = True,
        piece_chars_max: int | None = None,
    ) -> None:
        """Take the library's tokenizer.

        content: the tokenizer.json that it was read from; None: it was made otherwise.
        is_plain, is_modest: what it costs (`tokenizing.rules.Judgement`).
        piece_chars_max: of the vocabulary; None: looked up at first use.
        """
        raw.encode_special_tokens = True
        self._raw = raw
        self._parsing: RawTokenizer | None = None
        self._parsing_lock = threading.Lock()
        self._add_bos = add_bos
        self._content = content
        self.is_plain = is_plain
        """Whether a text of known length takes a known time."""
        self.is_modest = is_plain and is_modest
        """Whether it takes known memory, too, however long the text."""
        self.bos_id = bos_id
        """The id that begins a text, or None."""
        self.eos_ids = eos_ids
        """The ids that end a text, in the order of the file that names them; maybe none."""
        added = raw.get_added_tokens_decoder()
        beyond = sum(raw.model.token_to_id(token.content) is None for token in added.values())
        self.vocab_size: int = raw.get_vocab_size(with_added_tokens=False) + beyond
        """How many ids the tokenizer has, added tokens included; a model may have more rows."""
        self._piece_chars_max = piece_chars_max
        self._spell = _spell_of(raw)
        self._added = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """The ids that a text may be written without."""

    @property
    def spells(self) -> bool:
        """Whether a token has the same bytes wherever it stands."""
        return self._spell is not None

    @property
    def piece_chars_max(self) -> int:
        """The longest spelling in the vocabulary; no id stands for more characters of a text."""
        if self._piece_chars_max is None:  # a concurrent look-up finds the same
            vocabulary = self._raw.get_vocab(with_added_tokens=True)
            self._piece_chars_max = max(map(len, vocabulary), default=1)
        return self._piece_chars_max

    @property
    def content(self) -> bytes:
        """A tokenizer.json of which the same tokenizer can be read."""
        return self._raw.to_str().encode() if self._content is None else self._content

    @property
    def settings(self) -> dict[str, int | bool | None]:
        """What another process has to know beside, to encode alike."""
        return {"bos_id": self.bos_id, "add_bos": self._add_bos}

    def encode(
        self, text: str, *, begin_text: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the ids of `text`.

        begin_text: put before (and after) it what the model expects around a whole text, by
        tokenizer_config's add_bos_token where that is said, else by the post-processor.
        parse_special: read special tokens in the text as such; only for text that we rendered, such
        as a chat template's.
        """
        raw = self._parsing_raw() if parse_special else self._raw
        with library_faults("cannot read a text"):
            plain: Encoding = raw.encode_batch_fast([text], add_special_tokens=False)[0]
            ids: list[int] = plain.ids
            return self._begin_text(ids, self._raw.post_process(plain).ids) if begin_text else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD.

        An id that the tokenizer does not have (padding rows of the model) has no text.
        """
        with library_faults("cannot write a text"):
            (text,) = self._raw.decode_batch([ids], skip_special_tokens=skip_special)
        return str(text)

    def chars_max(self, tokens: int) -> int:
        """Return the most characters of text that this many ids can stand for."""
        return tokens * self.piece_chars_max * NORMALISED_CHARS_MAX

    def token_text(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of an id, or None where it has no such id."""
        text: str | None = self._raw.id_to_token(token_id)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that an id stands for, which may be a part of a character.

        A special token has its spelling, though the text may leave it out. An id that the tokenizer
        does not have has none. Under a decoder that is no matter of single tokens they are those of
        the text of the id alone.
        """
        spelled = self.token_text(token_id)
        if spelled is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._spell is None:
            return self.decode([token_id]).encode()
        return self._spell(spelled)

    def written_nbytes(self, token_id: int) -> int:
        """Return how many bytes the decoder makes of an id, special or not, where it `spells`."""
        spelled = self.token_text(token_id)
        assert self._spell is not None, "asked where tokens have no bytes of their own"
        return 0 if spelled is None else len(self._spell(spelled))

    def pieces(self) -> dict[int, bytes]:
        """Return the bytes that each id but a special one adds to a text; raises UnknownDecoder."""
        raw = self._raw
        spell = spelling(json.loads(raw.decoder.__getstate__()) if raw.decoder else None)
        vocabulary: dict[str, int] = raw.get_vocab(with_added_tokens=True)
        return {i: spell(text) for text, i in vocabulary.items() if i not in self.special_ids}

    def detokenizer(
        self,
        *,
        skip_special: bool = True,
        anchored: bool = False,
        shown: Mapping[int, str] = NOTHING_SHOWN,
    ) -> Detokenizer | MarkDecoder:
        """Return a fresh incremental decoder for one stream.

        anchored: give out all that a token spells, also where some decoders leave out a space
        because the text begins there.
        shown: ids that are given out as these texts, special or not.
        """
        with library_faults("cannot write a text"):
            plain = Detokenizer(self._raw, skip_special=skip_special, anchored=anchored)
        return MarkDecoder(plain, shown) if shown else plain

    def control_tokens(self, *, written: str, named: Collection[str]) -> ControlTokens:
        """Return what steers a chat.

        written: the chat template's source; named: the special tokens that it is given by name.
        """
        with library_faults("steers no chats"):
            return ControlTokens(self._raw, written=written, named=named)

    def _parsing_raw(self) -> RawTokenizer:
        """Return the twin that reads special tokens; the choice is a setting of the object."""
        with self._parsing_lock:
            if self._parsing is None:
                self._parsing = twin_of(self._raw)
            return self._parsing

    def _begin_text(self, plain: list[int], processed: list[int]) -> list[int]:
        """Return `processed` with the BOS that the model's files ask for, never a second one."""
        own, added = self._bos_count(plain), self._bos_count(processed)
        wanted = own or (added > 0 if self._add_bos is None else self._add_bos)
        return [self.bos_id or 0] * int(wanted) + processed[added:]

    def _bos_count(self, ids: list[int]) -> int:
        return next((i for i, token_id in enumerate(ids) if token_id != self.bos_id), len(ids))


def _spell_of(raw: RawTokenizer) -> Callable[[str], bytes] | None:
    """Return what gives a spelling's bytes; None where the decoder is no matter of single ones."""
    if raw.decoder is None:
        return str.encode
    try:
        return spelling(json.loads(raw.decoder.__getstate__()))
    except UnknownDecoder:
        return None


class MarkDecoder:
    """A detokenizer under which some ids have texts of their own, whatever is left out.

    Such a text stands alone: what was held back before it comes before it.
    """

    def __init__(self, plain: Detokenizer, shown: Mapping[int, str]) -> None:
        self._plain = plain
        self._shown = shown

    def push(self, token_id: int) -> str:
        """Take one id; return the characters that it completes, maybe none."""
        text = self._shown.get(token_id)
        return self._plain.push(token_id) if text is None else self._plain.finish() + text

    def finish(self) -> str:
        """Return what was held back."""
        return self._plain.finish()


class Detokenizer:
    """Decodes one stream's ids as they come. Owned by one thread.

    Pieces end on whole characters. Their concatenation, `finish` included, is `Tokenizer.decode` of
    all ids, but for ids that spell bytes which are no UTF-8. There a stream may hold more of the
    text: some decoders let one bad byte spoil good ones before it, and what was given out stays.
    """

    def __init__(self, raw: RawTokenizer, *, skip_special: bool, anchored: bool = False) -> None:
        self._raw = raw
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        # Some decoders strip a space at the start of a text. Behind this word nothing is a start.
        self._anchor: list[int] = raw.encode("a", add_special_tokens=False).ids
        self._context: list[int] = []
        self._pending: list[int] = []
        # A token may end one character and begin the next: what of the pending ids' text is given
        # out already, and how many of them there were then.
        self._released = ""
        self._given_count = 0
        if anchored:
            self._restart([])

    def push(self, token_id: int) -> str:
        """Take one id; return what it completes. Raises InvalidModel if the library cannot."""
        self._pending.append(token_id)
        try:  # nothing else around what each token of each stream goes through
            text: str | None = self._stream.step(self._raw, token_id)
        except BaseException as error:  # noqa: BLE001 - which one it may be is judged there
            return self._recover(error)
        if text is not None:
            start, self._released, self._given_count = self._released, "", 0
            self._context, self._pending = self._pending, []
            return text.removeprefix(start) if start else text
        with library_faults("cannot write a text"):
            whole = self._whole_characters()
            if not whole and len(self._pending) - self._given_count > HELD_TOKENS_MAX:
                return self._release(len(self._pending) - _TAIL_TOKENS)
            return whole

    def finish(self) -> str:
        """Return what was held back, with U+FFFD for an unfinished character; raises as `push`."""
        with library_faults("cannot write a text"):
            return self._release(len(self._pending)) if self._pending else ""

    def _recover(self, error: BaseException) -> str:
        """Return what is there where the library's stream cannot go on; raises as `push`."""
        with library_faults("cannot write a text"):
            # Bytes that turn out to be no UTF-8 change the text of those before them, which the
            # stream cannot continue from. The library raises the bare class for it.
            if "Invalid prefix" not in str(error):
                raise error
            return self._release(len(self._pending))

    def _whole_characters(self) -> str:
        """Return what the pending ids add before the character that is unfinished at their end."""
        text = self._text_behind(self._context, self._pending)
        sure = "" if text is None else text.rstrip(_REPLACEMENT)
        new = sure.removeprefix(self._released)
        if not new or not sure.startswith(self._released):
            return ""
        self._released, self._given_count = sure, len(self._pending)
        if len(self._pending) > HELD_TOKENS_MAX:  # character after character, and never level
            self._restart(self._pending[-_TAIL_TOKENS:])
        return new

    def _release(self, count: int) -> str:
        """Return the text of the first `count` pending ids, and start afresh behind them."""
        head, tail = self._pending[:count], self._pending[count:]
        text = self._text_behind(self._context, head)
        if text is None:
            text = self._text_behind(self._anchor, head)
        start = self._released
        more = self._restart(tail)
        return (text or "").removeprefix(start) + more

    def _restart(self, ids: list[int]) -> str:
        """Forget what came before `ids`; return the characters that they complete."""
        self._stream = DecodeStream(self._anchor, skip_special_tokens=self._skip_special)
        self._clear(self._anchor)
        return "".join(self.push(token_id) for token_id in ids)

    def _clear(self, context: list[int]) -> None:
        """Drop the pending ids; `context` is what has been returned as text."""
        self._context, self._pending, self._released, self._given_count = context, [], "", 0

    def _text_behind(self, context: list[int], ids: list[int]) -> str | None:
        """Return what `ids` add to the text of `context`, or None where they change it."""
        before = self._decode(context)
        both = self._decode(context + ids)
        return both[len(before) :] if both.startswith(before) else None

    def _decode(self, ids: list[int]) -> str:
        text: str = self._raw.decode(ids, skip_special_tokens=self._skip_special)
        return text
