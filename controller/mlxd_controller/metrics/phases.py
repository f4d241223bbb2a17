"""A Generate as the phases of its time, for a trace: from what its usage says of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's time, by how long ago it began and ended."""

    name: str
    begun_ago_s: float
    ended_ago_s: float


@dataclass(frozen=True, slots=True)
class Waits:
    """What came before the first token, as the worker has measured it."""

    load_s: float
    queue_s: float
    prompt_s: float


def phases_of(age_s: float, first_s: float | None, waits: Waits | None) -> tuple[Phase, ...]:
    """Return the phases of a request that came `age_s` ago and ends now.

    first_s: its age at its first token; None: none came. waits: None where nobody has measured
    them, or where a stream has had several workers; then what came before the first token is one
    phase, `wait`. Else these are `load`, which is counted from the request's coming, and `queue`
    and `prompt`, from the first token back. Nothing begins before the request does.
    """
    if first_s is None:
        return (Phase("wait", age_s, 0.0),)
    since_first_s = age_s - first_s
    tokens = Phase("tokens", since_first_s, 0.0)
    if waits is None:
        return (Phase("wait", age_s, since_first_s), tokens)
    prompt_ago_s = min(since_first_s + waits.prompt_s, age_s)
    queue_ago_s = min(prompt_ago_s + waits.queue_s, age_s)
    loaded_ago_s = max(age_s - waits.load_s, queue_ago_s)
    return (
        Phase("load", age_s, loaded_ago_s),
        Phase("queue", queue_ago_s, prompt_ago_s),
        Phase("prompt", prompt_ago_s, since_first_s),
        tokens,
    )
