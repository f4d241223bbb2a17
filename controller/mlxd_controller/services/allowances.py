"""What each key may still use: which models, streams at once, requests and tokens per minute.

Rates are token buckets that hold a minute's worth and refill evenly. A request is charged at its
start. The tokens of prompt and answer are charged at the end of a stream; a key in debt waits until
the bucket is above zero again. One owner: the event loop's thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mlxd_controller.metrics.counters import Metrics
from mlxd_controller.runtime.ports import Clock
from mlxd_controller.services.meter import Counts
from mlxd_shared.domain.errors import KeyLimit, NotAllowed
from mlxd_shared.ops.metrics import Gauges, labels
from mlxd_shared.security.keys import Key

STREAMS_RETRY_S = 1.0
"""When to retry if all of a key's streams are in use: nobody knows when one ends."""


@dataclass(slots=True)
class Bucket:
    """`a_minute` units, refilled evenly; the level is below 0 after more was taken than it held."""

    a_minute: int
    filled_s: float
    level: float

    @classmethod
    def full(cls, a_minute: int, now_s: float) -> Bucket:
        """Return a full bucket."""
        return cls(a_minute, now_s, float(a_minute))

    def wait_s(self, now_s: float, least: float) -> float:
        """Return how long until the bucket holds `least` units; 0 if it does already."""
        grown = self.level + (now_s - self.filled_s) * self.a_minute / 60
        self.level, self.filled_s = min(grown, float(self.a_minute)), now_s
        return max(0.0, (least - self.level) * 60 / self.a_minute)

    def take(self, units: int) -> None:
        """Take units, even more than the bucket holds."""
        self.level -= units


@dataclass(slots=True)
class _Account:
    """What one key has in progress, and its buckets; None for a rate without a limit."""

    key: Key
    requests: Bucket | None
    tokens: Bucket | None
    streams: int = 0

    @classmethod
    def of(cls, key: Key, now_s: float, streams: int) -> _Account:
        rates = (key.requests_per_minute, key.tokens_per_minute)
        requests, tokens = (None if rate is None else Bucket.full(rate, now_s) for rate in rates)
        return cls(key, requests, tokens, streams)


@dataclass(slots=True)
class Allowances:
    """The accounts of all keys that have called. A key whose limits have changed starts afresh."""

    clock: Clock
    metrics: Metrics
    _accounts: dict[str, _Account] = field(default_factory=dict)

    @contextmanager
    def spending(self, key: Key | None, names: tuple[str, ...], counts: Counts) -> Iterator[None]:
        """Admit a key's request for the body, and charge `counts` at its end, however it ends.

        key: None is not limited. names: those of the model.

        Raises:
            NotAllowed: the key is not for this model.
            KeyLimit: a limit is used up; the error says when to retry.
        """
        if key is None:
            yield
            return
        account = self._account(key)
        try:
            self._check(account, names)
        except (NotAllowed, KeyLimit):
            self.metrics.key_requests.add(key=key.name, outcome="refused")
            raise
        self.metrics.key_requests.add(key=key.name, outcome="served")
        account.streams += 1
        if account.requests is not None:
            account.requests.take(1)
        try:
            yield
        finally:
            self._close(key.name, counts)

    def gauges(self) -> Gauges:
        """Return how many requests of each key are in progress."""
        return {labels(key=name): float(each.streams) for name, each in self._accounts.items()}

    def _account(self, key: Key) -> _Account:
        """Return the key's account; if its limits have changed, a new one with its streams."""
        account = self._accounts.get(key.name)
        if account is None or account.key != key:
            streams = 0 if account is None else account.streams
            account = _Account.of(key, self.clock.now_s(), streams)
            self._accounts[key.name] = account
        return account

    def _check(self, account: _Account, names: tuple[str, ...]) -> None:
        key, now_s = account.key, self.clock.now_s()
        key.check_model(*names)
        if key.streams is not None and account.streams >= key.streams:
            raise KeyLimit(key.name, "requests at once", key.streams, STREAMS_RETRY_S)
        rates = ((account.requests, "requests a minute"), (account.tokens, "tokens a minute"))
        for bucket, what in rates:
            wait_s = 0.0 if bucket is None else bucket.wait_s(now_s, 1.0)
            if bucket is not None and wait_s > 0:
                raise KeyLimit(key.name, what, bucket.a_minute, math.ceil(wait_s * 1000) / 1000)

    def _close(self, name: str, counts: Counts) -> None:
        account = self._accounts[name]
        account.streams -= 1
        if account.tokens is not None:
            account.tokens.take(counts.prompt_tokens + counts.generated_tokens)
        self.metrics.key_prompt_tokens.add(counts.prompt_tokens, key=name)
        self.metrics.key_generated_tokens.add(counts.generated_tokens, key=name)
