"""What a load generator is told: plain values that cross as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity

GRPC = "grpc"
"""A server of mlxd, by our own protocol."""

SETTLED = "settled"
"""What a generator writes, in a line, that is to begin together with others."""


@dataclass(frozen=True, slots=True)
class Request:
    """One stream to ask for: exactly `max_tokens` tokens after a prompt of `prompt_tokens`.

    The prompt is `text`, or `ids` where there are any.
    """

    text: str
    prompt_tokens: int
    max_tokens: int
    at_s: float | None = None
    """When to send it, from the start of the load; None: as soon as a client is free."""
    after: int | None = None
    """Send it with the first token of the request of this index."""
    seed: int | None = None
    temperature: float = 0.0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A load on one server."""

    kind: str
    """What speaks to it, such as GRPC."""
    target: str
    """host:port."""
    model: str
    settling: tuple[Request, ...]
    """Sent one after another before the load, untimed."""
    requests: tuple[Request, ...]
    clients: int
    """How many connections there are; as many requests are in flight, but for those with `at_s`
    or `after`, which wait for nobody."""
    security: ChannelSecurity = PLAIN
    together: bool = False
    """Whether it is one of several that begin together: its process writes SETTLED when it has
    settled, and begins with the next line that it reads."""


def job_to_json(job: Job) -> bytes:
    """Return a job as one line."""
    return json.dumps(asdict(job), default=str).encode() + b"\n"


def job_from_json(line: bytes) -> Job:
    """Return what `job_to_json` wrote."""
    values: dict[str, Any] = json.loads(line)
    for name in ("settling", "requests"):
        values[name] = tuple(
            Request(**request | {"ids": tuple(request["ids"])}) for request in values[name]
        )
    files = {name: file and Path(file) for name, file in values.pop("security").items()}
    return Job(**values, security=ChannelSecurity(**files))
