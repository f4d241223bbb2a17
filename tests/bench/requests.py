"""What a load generator is told and what it tells: plain values that cross as JSON.

Inter-token time, for either side: tokens that come in one message share its time, so a message of n
tokens counts its gap to the message before once, and n - 1 zeros.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

GRPC, HTTP = "grpc", "http"


@dataclass(frozen=True, slots=True)
class Request:
    """One stream to ask for: exactly `max_tokens` tokens after a prompt of `prompt_tokens`."""

    text: str
    prompt_tokens: int
    max_tokens: int
    at_s: float | None = None
    """When to send it, from the start of the load; None: as soon as a client is free."""
    after: int | None = None
    """Send it with the first token of the request of this index."""
    seed: int | None = None
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """A load on one server."""

    kind: str
    """GRPC or HTTP."""
    target: str
    """host:port."""
    model: str
    settling: tuple[Request, ...]
    """Sent one after another before the load, untimed."""
    requests: tuple[Request, ...]
    clients: int
    """How many connections there are; as many requests are in flight, but for those with `at_s`
    or `after`, which wait for nobody."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One stream as its client saw it; times in seconds on the generator's clock."""

    sent_s: float
    stamps_s: tuple[float, ...]
    """When each message with tokens came."""
    counts: tuple[int, ...]
    """How many tokens each of them brought."""
    text: str

    @property
    def tokens(self) -> int:
        """How many tokens came."""
        return sum(self.counts)

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.stamps_s[0] - self.sent_s

    def gaps_s(self) -> list[float]:
        """Return the times between tokens, one fewer than tokens."""
        gaps = [0.0] * (self.counts[0] - 1)
        for before_s, now_s, count in zip(
            self.stamps_s, self.stamps_s[1:], self.counts[1:], strict=False
        ):
            gaps += [now_s - before_s, *([0.0] * (count - 1))]
        return gaps


def job_to_json(job: Job) -> bytes:
    """Return a job as one line."""
    return json.dumps(asdict(job)).encode() + b"\n"


def job_from_json(line: bytes) -> Job:
    """Return what `job_to_json` wrote."""
    values: dict[str, Any] = json.loads(line)
    for name in ("settling", "requests"):
        values[name] = tuple(Request(**request) for request in values[name])
    return Job(**values)


def outcomes_to_json(outcomes: Sequence[Outcome]) -> str:
    """Return outcomes as one line."""
    return json.dumps([asdict(outcome) for outcome in outcomes])


def outcomes_from_json(line: bytes) -> list[Outcome]:
    """Return what `outcomes_to_json` wrote."""
    return [
        Outcome(
            sent_s=values["sent_s"],
            stamps_s=tuple(values["stamps_s"]),
            counts=tuple(values["counts"]),
            text=values["text"],
        )
        for values in json.loads(line)
    ]
