"""What a stream has sent so far, so that another worker can continue it.

Messages are kept as received and parsed in bulk: most streams end without a loss. Offsets leave no
gap and repeat nothing; whatever follows a message that breaks this is not part of the stream.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from mlxd.v1 import inference_pb2

UNPARSED_NBYTES_MAX = 1 << 16
"""Above this size messages are parsed, and only their token ids are kept, 4 bytes each."""


class Journal:
    """One stream's messages. `resumed` are the tokens that its client already had."""

    def __init__(self, resumed: Sequence[int] = ()) -> None:
        self._ids = array("I", resumed)
        self._frames: list[bytes] = []
        self.unparsed_nbytes = 0
        """The size of the messages kept as received."""
        self._seed: int | None = None
        self._prompt_tokens = 0
        self._problem = ""
        self.messages = 0
        """How many messages have been added."""

    def add(self, frame: bytes) -> None:
        """Keep one message, unparsed."""
        self.messages += 1
        self._frames.append(frame)
        self.unparsed_nbytes += len(frame)
        if self.unparsed_nbytes > UNPARSED_NBYTES_MAX:
            self._parse()

    def check(self, message: inference_pb2.GenerateResponse) -> str:
        """Return what is wrong with the offset of the next message; "" if nothing."""
        offset = self.offset
        return self._problem or _describe_gap(message, offset)

    @property
    def problem(self) -> str:
        """What was wrong with the offsets so far; "" if nothing."""
        self._parse()
        return self._problem

    @property
    def offset(self) -> int:
        """How many tokens the stream has, including those its client already had."""
        self._parse()
        return len(self._ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens of the stream."""
        self._parse()
        return self._ids

    @property
    def seed(self) -> int | None:
        """The seed in use, once a worker has reported it."""
        self._parse()
        return self._seed

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has; 0 until a worker reports it, and for further choices."""
        self._parse()
        return self._prompt_tokens

    def _parse(self) -> None:
        frames, self._frames, self.unparsed_nbytes = self._frames, [], 0
        for frame in frames:
            message = inference_pb2.GenerateResponse.FromString(frame)
            self._problem = self._problem or _describe_gap(message, len(self._ids))
            if self._problem:
                return
            self._ids.extend(message.token_ids)
            if message.HasField("seed"):
                self._seed = message.seed
            self._prompt_tokens = self._prompt_tokens or message.prompt_tokens


def _describe_gap(message: inference_pb2.GenerateResponse, offset: int) -> str:
    if message.offset == offset:
        return ""
    return f"a message begins at token {message.offset}, after {offset} tokens"
