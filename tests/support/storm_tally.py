"""What clients ask for in a storm, what they get of it, and how it all ended.

Invariants:
- Whatever ends a stream, what came of it before is the beginning of what it got alone; all of that
  where it is complete. Only after a migration, or a resumption by its client, and where the stream
  tells of a near tie, may it go on otherwise: that is counted.
- Each request that is begun is counted among the ends once.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from mlxd import Delta, Finished

TOLD_MAX = 20
"""So many faults are told of; of more, only how many there were."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request, and what it gets alone."""

    model: str
    prompt: str
    temperature: float
    seed: int
    max_tokens: int
    token_ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(slots=True)
class Got:
    """What one request has got so far."""

    job: Job
    begin_s: float
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: Finished | None = None
    heard_s: float = 0.0
    first_s: float | None = None
    gap_s: float = 0.0
    """The longest silence since the first token."""
    gap_begin_s: float = 0.0
    """When that began."""

    def hear(self, event: Delta | Finished) -> None:
        """Take in what came."""
        now_s = time.monotonic()
        if self.first_s is None:
            self.first_s = now_s - self.begin_s
        elif now_s - self.heard_s > self.gap_s:
            self.gap_s, self.gap_begin_s = now_s - self.heard_s, self.heard_s
        self.heard_s = now_s
        if isinstance(event, Finished):
            self.finished = event
        else:
            self.token_ids += event.token_ids
            self.text += event.text

    @property
    def right(self) -> bool:
        """Whether it is what the request gets alone, as far as it came."""
        job = self.job
        if tuple(self.token_ids) != job.token_ids[: len(self.token_ids)]:
            return False
        if self.finished is None:
            return job.text.startswith(self.text)
        counted = self.finished.usage.completion_tokens
        return self.text == job.text and counted == len(self.token_ids) == len(job.token_ids)

    def describe(self, label: str) -> str:
        """Return one line about it."""
        job = self.job
        pairs = zip(self.token_ids, job.token_ids, strict=False)
        agree = next((n for n, (a, b) in enumerate(pairs) if a != b), len(self.token_ids))
        usage = None if self.finished is None else self.finished.usage
        moved = "" if usage is None else f", moved {usage.migrations}, ties {usage.near_ties}"
        return (
            f"{label}: {job.model} {job.prompt[:30]!r} T={job.temperature} seed {job.seed}, "
            f"{len(self.token_ids)} of {len(job.token_ids)} tokens, {agree} of them right{moved}, "
            f"after {time.monotonic() - self.begin_s:.1f} s"
        )


@dataclass(slots=True)
class Tally:
    """What became of the requests of many clients. A fault is a line about it."""

    begun: int = 0
    complete: int = 0
    left: int = 0
    """By their clients."""
    ended_by: dict[str, int] = field(default_factory=dict)
    """By a status: its reason, and how often."""
    broke_off: int = 0
    """Of those, streams that had begun."""
    ties: int = 0
    """Complete, and not as alone, after a migration and a near tie."""
    wrong: list[str] = field(default_factory=list)
    undocumented: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    tokens: int = 0
    migrated: int = 0
    """Complete streams that moved at least once."""
    migrations: int = 0
    """How often these moved in all."""
    first_token_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    """What those waited who were refused before their first token."""
    move_gap_s: list[float] = field(default_factory=list)
    """The longest silence in each complete stream that moved."""
    resumed: int = 0
    """Complete streams that their clients have resumed."""
    moves: list[tuple[float, float]] = field(default_factory=list)
    """Of each complete stream that moved or was resumed: when its longest silence began, by the
    system's own clock, and how long that was."""

    def count_outcome(self, got: Got) -> None:
        """Count what came of a request that is over."""
        self.tokens += len(got.token_ids)
        if got.first_s is not None:
            self.first_token_s.append(got.first_s)

    def saw_left(self, got: Got) -> None:
        """Count one that its client has left."""
        self.count_outcome(got)
        if got.right:
            self.left += 1
        else:
            tell(self.wrong, got.describe("left"))

    def saw_complete(self, got: Got) -> None:
        """Count one that has finished."""
        assert got.finished is not None
        self.count_outcome(got)
        usage = got.finished.usage
        if usage.migrations:
            self.migrated += 1
            self.migrations += usage.migrations
            self.move_gap_s.append(got.gap_s)
        self.resumed += bool(usage.calls.lost)
        moved = bool(usage.migrations or usage.calls.lost)
        if moved:
            self.moves.append((got.gap_begin_s, got.gap_s))
        if got.right:
            self.complete += 1
        elif moved and usage.near_ties:
            self.ties += 1
        else:
            tell(self.wrong, got.describe("complete"))

    def saw_status(self, got: Got, reason: str) -> None:
        """Count one that a documented status has ended."""
        self.count_outcome(got)
        if not got.right:
            tell(self.wrong, got.describe(reason))
            return
        self.ended_by[reason] = self.ended_by.get(reason, 0) + 1
        if got.first_s is None:
            self.refused_s.append(time.monotonic() - got.begin_s)
        else:
            self.broke_off += 1

    def saw_undocumented(self, got: Got, status: str) -> None:
        """Count one that ended with a status that it should never end with."""
        self.count_outcome(got)
        tell(self.undocumented, got.describe(status))

    def saw_hanging(self, got: Got) -> None:
        """Count one that did not end."""
        self.count_outcome(got)
        tell(self.hung, got.describe("hung"))

    @property
    def ends(self) -> int:
        """How many requests have ended."""
        ended = self.complete + self.ties + self.left + sum(self.ended_by.values())
        return ended + len(self.wrong) + len(self.undocumented) + len(self.hung)


def together(tallies: list[Tally]) -> Tally:
    """Return what the clients of several processes had."""
    ended_by: Counter[str] = Counter()
    for tally in tallies:
        ended_by.update(tally.ended_by)
    return Tally(
        begun=sum(tally.begun for tally in tallies),
        complete=sum(tally.complete for tally in tallies),
        left=sum(tally.left for tally in tallies),
        ended_by=dict(ended_by),
        broke_off=sum(tally.broke_off for tally in tallies),
        ties=sum(tally.ties for tally in tallies),
        wrong=[line for tally in tallies for line in tally.wrong],
        undocumented=[line for tally in tallies for line in tally.undocumented],
        hung=[line for tally in tallies for line in tally.hung],
        tokens=sum(tally.tokens for tally in tallies),
        migrated=sum(tally.migrated for tally in tallies),
        migrations=sum(tally.migrations for tally in tallies),
        first_token_s=[value for tally in tallies for value in tally.first_token_s],
        refused_s=[value for tally in tallies for value in tally.refused_s],
        move_gap_s=[value for tally in tallies for value in tally.move_gap_s],
        resumed=sum(tally.resumed for tally in tallies),
        moves=[move for tally in tallies for move in tally.moves],
    )


def tell(lines: list[str], line: str) -> None:
    """Note a fault."""
    lines.append(line if len(lines) < TOLD_MAX else "")
