"""Run mixed streams through a host of one rank or of several; a process of its own.

`python -m tests.worker.distributed.rank_run RANKS OUT MODEL [--streams N] [--tokens MOST]
[--weights FORM] [--hit STEP SIGNAL]`: the signal goes to the last follower once a stream that has a
constraint has come to some tokens, from that step on.
"""

from __future__ import annotations

import json
import os
import random
import threading
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from mlxd_models.files.model_source import files_of
from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import ShuttingDown
from mlxd_shared.domain.requests import LoadSpec, Sampling, Weights
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.request import (
    Cancel,
    Event,
    Failed,
    Finished,
    Sink,
    StreamId,
    Submit,
    Tokens,
)
from mlxd_worker.machine.backend import prepare_backend
from mlxd_worker.thread.facts import Loaded, LoadJob
from tests.worker.distributed.holding import hold
from tests.worker.distributed.leading import lead, pid_of

STREAMS = 24
HELD: Final[Mapping[int, str]] = {
    2: "json", 5: "regex", 7: "required", 10: "calls", 13: "grammar", 16: "json", 19: "calls",
    21: "regex",
}  # fmt: skip
"""The streams that have a constraint, and of which kind."""
SLOW: Final = 21
"""The stream whose masks are not made before all others have ended."""
SLOW_S = 600.0
CANCELLED: Final = 3
HELD_TOKENS = 60
SEED = 7
TEXT = "the cat dog ran to a big tree and saw little bird who said hello she was happy"
WORDS = tuple(TEXT.split())


@dataclass
class Heard(Sink):
    """A sink that keeps what it gets."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""
    reason: str = ""
    ended: bool = False

    def put(self, event: Event) -> None:
        """Keep it."""
        if isinstance(event, Failed):
            self.error = event.error.describe()
        elif isinstance(event, Tokens | Finished):
            self.ids += event.ids
            self.text += event.text
        if isinstance(event, Finished):
            self.reason = event.reason.name
        self.ended = not isinstance(event, Tokens)


def make_requests(model: Path, count: int, most: int, sinks: dict[int, Heard]) -> list[Submit]:
    """Return streams of all kinds over one beginning, each of `most` tokens at most.

    The first ones are the same however many there are.
    """
    from mlxd_worker.tokenizing.files import load_tokenizer  # noqa: PLC0415 - after the BLAS

    tokenizer, draw = load_tokenizer(files_of(model)), random.Random(SEED)
    requests = []
    for n in range(count):
        more = draw.choices(WORDS, k=draw.choice((3, 20, 60, 120)))
        text = "Once upon a time there was a little girl named Lily. " + " ".join(more)
        sampling = Sampling(
            temperature=0.0 if n % 2 == 0 else 0.8,
            top_k=0 if n % 2 == 0 else 40,
            top_p=1.0 if n % 2 == 0 else 0.9,
            min_p=0.0,
            seed=n,
            repetition_penalty=1.1 if n % 5 == 4 else 1.0,
        )
        sinks[n] = Heard()
        requests.append(
            Submit(
                stream=StreamId(n),
                prompt=tuple(tokenizer.encode(text)),
                sampling=sampling,
                max_tokens=min(draw.choice((8, 16, 40)), most),
                submitted_s=0.0,
                sink=sinks[n],
                stop=("happy",) if n % 6 == 5 else (),
                top_logprobs=3 if n % 7 == 6 else None,
            )
        )
    return requests


def hold_some(requests: list[Submit], loaded: Loaded, most: int) -> threading.Lock:
    """Put streams of `HELD` under their constraints, in place; return what keeps SLOW waiting.

    They draw no blanks alone, of which JSON takes any number.
    """
    waits, tokenizer = threading.Lock(), loaded.tokenizer
    blanks = [i for i, piece in tokenizer.pieces().items() if not piece.strip()]
    bias = tuple((i, -50.0) for i in sorted(blanks))
    for n, kind in HELD.items():
        if n >= len(requests):
            continue
        constraint = hold(loaded.constraints, kind)
        if n == SLOW:
            assert isinstance(constraint, Constraint)
            constraint = replace(constraint, mask_s=SLOW_S)
            waits = constraint.turns.lock
        requests[n] = replace(
            requests[n],
            constraint=constraint,
            eos_ids=frozenset(tokenizer.eos_ids),
            max_tokens=min(HELD_TOKENS, most),
            sampling=replace(requests[n].sampling, logit_bias=bias),
        )
    return waits


def run(
    host: Any, coming: list[Submit], sinks: dict[int, Heard], act: Callable[[int], None]
) -> int:
    """Run streams, one more every third step; return how many steps that took.

    act: is called before each step.
    """
    steps = 0
    while coming or host.busy:
        if coming and (steps % 3 == 0 or not host.busy):
            host.submit(coming.pop(0))
        if steps == 15:
            host.cancel(Cancel(StreamId(CANCELLED)))
        if steps == 40:
            host.shrink(0)
        act(steps)
        if host.busy:
            host.step()
        steps += 1
    return steps


def main() -> None:
    """Run them; write each one's tokens, texts, reasons to end, and errors."""
    parser = ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--tokens", type=int, default=HELD_TOKENS)
    parser.add_argument("--weights", type=Weights, default=Weights.AUTO)
    parser.add_argument("--hit", type=int, nargs=2, default=(0, 0))
    options = parser.parse_args()
    ranks, (hit_at, number) = options.ranks, options.hit
    prepare_backend()
    from mlxd_worker.thread.host import ModelHost  # noqa: PLC0415 - after the BLAS

    config.RANK_CHECK_STEPS = 1  # ranks compare their states after each step
    host = ModelHost(device=DeviceKind.CPU) if ranks == 1 else lead(ranks)
    spec = LoadSpec(rows_max=8, weights=options.weights)
    loaded = host.load(LoadJob(options.model, "demo", "d" * 64, spec), lambda _: None)
    sinks: dict[int, Heard] = {}
    coming = make_requests(options.model, options.streams, options.tokens, sinks)
    waits = hold_some(coming, loaded, options.tokens)

    hits = [number] if number else []

    def act(step: int) -> None:
        others = [sink for n, sink in sinks.items() if n not in {SLOW, CANCELLED}]
        if waits.locked() and all(sink.ended for sink in others):
            waits.release()
        held = [sink for n, sink in sinks.items() if n in HELD and sink.ids and not sink.ended]
        if hits and step >= hit_at and held:
            print("hit", flush=True)  # noqa: T201 - for the test
            os.kill(pid_of(ranks - 1), hits.pop())

    waits.acquire()
    try:
        steps = run(host, coming, sinks, act)
    finally:
        if waits.locked():
            waits.release()
    host.end_streams(ShuttingDown())
    host.rest()
    whole = {
        "ids": {str(n): sink.ids for n, sink in sinks.items()},
        "texts": {str(n): sink.text for n, sink in sinks.items()},
        "reasons": {str(n): sink.reason for n, sink in sinks.items()},
        "errors": [sink.error for sink in sinks.values() if sink.error],
        "nbytes": host.figures().mlx_active_nbytes,
        "steps": steps,
    }
    options.out.write_text(json.dumps(whole))


if __name__ == "__main__":
    main()
