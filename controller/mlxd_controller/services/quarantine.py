"""Prompts that workers died of, so that one of them does not end worker after worker.

Invariants:
- A death is held against the prompts that had not brought a token forth on the worker that died,
  once, however many requests had that prompt; a prompt that brings one forth is cleared. So who is
  merely beside the culprit, and gets on, is not suspected; nor is who waited behind all rows.
- Bounded: the prompts of longest ago are forgotten first, and every one after `FORGET_S`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from mlxd.v1 import inference_pb2
from mlxd_controller.ports import Clock
from mlxd_shared.errors import PoisonPrompt

DEATHS_MAX = 2
"""A prompt that so many workers died of in a row is refused."""

PROMPTS_MAX = 1024
FORGET_S = 600.0


@dataclass(frozen=True, slots=True)
class _Deaths:
    """The workers that died of one prompt, and when the last of them did."""

    incarnations: tuple[str, ...]
    last_s: float


class Quarantine:
    """One owner: the controller's event loop."""

    def __init__(self, clock: Clock) -> None:
        """Suspect nothing."""
        self._clock = clock
        self._deaths: OrderedDict[bytes, _Deaths] = OrderedDict()

    def __len__(self) -> int:
        return len(self._deaths)

    def check(self, key: bytes, model: str) -> None:
        """Let a prompt pass.

        Raises:
            PoisonPrompt: DEATHS_MAX workers in a row died of it.
        """
        self._forget()
        found = self._deaths.get(key)
        if found is not None and len(found.incarnations) >= DEATHS_MAX:
            left_s = found.last_s + FORGET_S - self._clock.now_s()
            raise PoisonPrompt(model, len(found.incarnations), left_s)

    def died(self, key: bytes, incarnation: str) -> None:
        """Note that a worker died before this prompt had brought anything forth on it."""
        found = self._deaths.pop(key, None)
        before = () if found is None else found.incarnations
        if incarnation not in before:
            before = (*before, incarnation)[-DEATHS_MAX:]
        self._deaths[key] = _Deaths(before, self._clock.now_s())
        while len(self._deaths) > PROMPTS_MAX:
            self._deaths.popitem(last=False)

    def got_on(self, key: bytes) -> None:
        """Clear a prompt: a worker has gone on from it."""
        self._deaths.pop(key, None)

    def _forget(self) -> None:
        now_s = self._clock.now_s()
        while self._deaths:
            oldest = next(iter(self._deaths.values()))
            if now_s - oldest.last_s < FORGET_S:
                return
            self._deaths.popitem(last=False)


def key_of(request: inference_pb2.GenerateRequest, digest: str) -> bytes:
    """Return what names a prompt of a model: a hash over what a worker is given to work on."""
    content = inference_pb2.GenerateRequest(model=digest)
    match request.WhichOneof("prompt"):
        case "text":
            content.text = request.text
        case "tokens":
            content.tokens.CopyFrom(request.tokens)
        case _:
            content.chat.CopyFrom(request.chat)
    if request.HasField("response_format"):
        content.response_format.CopyFrom(request.response_format)
    return hashlib.sha256(content.SerializeToString(deterministic=True)).digest()
