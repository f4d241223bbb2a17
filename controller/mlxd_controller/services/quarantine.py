"""Prompts that workers died of, so that one of them does not end worker after worker.

Invariants:
- A death counts, once, against each prompt that had not produced a token on the worker that died;
  producing one clears a prompt. So neither requests that ran beside the culprit are suspected, nor
  requests that waited behind all rows.
- Suspects of one model run one at a time, each until its first token: if a worker died of one of
  two, the second death tells which, and the innocent one loses only its place in the queue.
- The oldest suspects are forgotten first, and every one after `FORGET_S`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from mlxd.v1 import inference_pb2
from mlxd_controller.runtime.ports import Clock
from mlxd_shared.domain.errors import PoisonPrompt
from mlxd_shared.wire.intake import run_paced

DEATHS_MAX = 2
"""A prompt that this many workers in a row died of is refused."""

TRIAL_WAIT_MAX_S = 5.0
"""After this long a suspect runs beside others: nobody waits for ever for a slow one."""

PROMPTS_MAX = 1024
FORGET_S = 600.0


@dataclass(frozen=True, slots=True)
class _Deaths:
    """The workers that died of one prompt, and when the last of them did."""

    incarnations: tuple[str, ...]
    last_s: float
    cleared: asyncio.Event
    """Set once the prompt is cleared, so that requests need not wait for its trial."""


class Quarantine:
    """One owner: the controller's event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._deaths: OrderedDict[bytes, _Deaths] = OrderedDict()
        self._trials: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def has_suspects(self) -> bool:
        """Whether any prompt is suspected; otherwise nobody need know what a prompt's key is."""
        self._forget()
        return bool(self._deaths)

    def check(self, key: bytes, model: str) -> None:
        """Check a prompt.

        Raises:
            PoisonPrompt: DEATHS_MAX workers in a row died of it.
        """
        self._forget()
        deaths = self._deaths.get(key)
        if deaths is not None and len(deaths.incarnations) >= DEATHS_MAX:
            left_s = deaths.last_s + FORGET_S - self._clock.now_s()
            raise PoisonPrompt(model, len(deaths.incarnations), left_s)

    def note_death(self, key: bytes, incarnation: str) -> None:
        """Note that a worker died before this prompt had produced a token on it."""
        deaths = self._deaths.pop(key, None) or _Deaths((), 0.0, asyncio.Event())
        before = deaths.incarnations
        if incarnation not in before:
            before = (*before, incarnation)[-DEATHS_MAX:]
        self._deaths[key] = _Deaths(before, self._clock.now_s(), deaths.cleared)
        while len(self._deaths) > PROMPTS_MAX:
            self._deaths.popitem(last=False)

    def clear(self, key: bytes) -> None:
        """Clear a prompt: a worker has produced a token from it."""
        deaths = self._deaths.pop(key, None)
        if deaths is not None:
            deaths.cleared.set()

    @asynccontextmanager
    async def trial(self, key: bytes, *, digest: str, model: str) -> AsyncIterator[None]:
        """Hold the model's one place for suspects if the prompt is one; leave at its first token.

        Raises:
            PoisonPrompt: another request has proved the prompt fatal meanwhile.
        """
        deaths = self._deaths.get(key)
        if deaths is None:
            yield
            return
        place = self._trials.setdefault(digest, asyncio.Lock())
        has_place = await _acquire_unless(place, unless=deaths.cleared, wait_s=TRIAL_WAIT_MAX_S)
        try:
            self.check(key, model)
            yield
        finally:
            if has_place:
                place.release()

    def _forget(self) -> None:
        now_s = self._clock.now_s()
        while self._deaths:
            oldest = next(iter(self._deaths.values()))
            if now_s - oldest.last_s < FORGET_S:
                return
            self._deaths.popitem(last=False)


async def _acquire_unless(place: asyncio.Lock, *, unless: asyncio.Event, wait_s: float) -> bool:
    """Return whether `place` was acquired within the time and before `unless` was set."""
    if not place.locked():
        return await place.acquire()
    taking = asyncio.create_task(place.acquire())
    cleared = asyncio.create_task(unless.wait())
    try:
        await asyncio.wait((taking, cleared), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if taking.done():
            place.release()
        raise
    finally:
        taking.cancel()
        cleared.cancel()
    return taking.done() and not taking.cancelled()


class PromptKey:
    """A prompt's key, which is made when it is first asked for: that copies the prompt twice."""

    def __init__(self, request: inference_pb2.GenerateRequest, digest: str) -> None:
        """Be the key of `request` to the model with this digest."""
        self._request = request
        self._digest = digest
        self._key: bytes | None = None
        self._making = asyncio.Lock()

    async def get(self) -> bytes:
        """Return it, as `key_of` makes it: once, whoever asks at the same moment."""
        async with self._making:
            if self._key is None:
                self._key = await run_paced(key_of, self._request, self._digest)
            return self._key


def key_of(request: inference_pb2.GenerateRequest, digest: str) -> bytes:
    """Return the hash that identifies a model's prompt: of everything a worker works on."""
    content = inference_pb2.GenerateRequest(model=digest)
    match request.WhichOneof("prompt"):
        case "text":
            content.text = request.text
        case "tokens":
            content.tokens.CopyFrom(request.tokens)
        case _:
            content.chat.CopyFrom(request.chat)
            content.chat.ClearField("now")  # differs for each request
    if request.HasField("response_format"):
        content.response_format.CopyFrom(request.response_format)
    return hashlib.sha256(content.SerializeToString(deterministic=True)).digest()
