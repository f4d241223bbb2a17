"""Run mixed streams through a host of one rank or of several; a process of its own.

`python -m tests.worker.distributed.rank_run RANKS OUT MODEL [--streams N] [--tokens MOST]
[--weights FORM] [--hit STEP SIGNAL]`: the signal goes to the last follower before that step.
"""

from __future__ import annotations

import json
import os
import random
from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path

from mlxd_models.files.model_source import files_of
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import ShuttingDown
from mlxd_shared.domain.requests import LoadSpec, Sampling, Weights
from mlxd_worker.engine.request import Cancel, Event, Failed, Finished, StreamId, Submit, Tokens
from mlxd_worker.machine.backend import prepare_backend
from mlxd_worker.thread.facts import LoadJob
from tests.worker.distributed.leading import lead, pid_of

STREAMS = 24
SEED = 7
TEXT = "the cat dog ran to a big tree and saw little bird who said hello she was happy"
WORDS = tuple(TEXT.split())


@dataclass
class Heard:
    """A sink that keeps what it gets."""

    ids: list[int] = field(default_factory=list)
    error: str = ""

    def put(self, event: Event) -> None:
        """Keep it."""
        if isinstance(event, Failed):
            self.error = event.error.describe()
        elif isinstance(event, Tokens | Finished):
            self.ids += event.ids


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


def main() -> None:
    """Run them, one more every third step; write each one's tokens, and errors."""
    parser = ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--weights", type=Weights, default=Weights.AUTO)
    parser.add_argument("--hit", type=int, nargs=2, default=(-1, 0))
    options = parser.parse_args()
    ranks, (hit_at, number) = options.ranks, options.hit
    prepare_backend()
    from mlxd_worker.thread.host import ModelHost  # noqa: PLC0415 - after the BLAS

    host = ModelHost(device=DeviceKind.CPU) if ranks == 1 else lead(ranks)
    spec = LoadSpec(rows_max=8, weights=options.weights)
    host.load(LoadJob(options.model, "demo", "d" * 64, spec), lambda _: None)
    sinks: dict[int, Heard] = {}
    coming, steps = make_requests(options.model, options.streams, options.tokens, sinks), 0
    while coming or host.busy:
        if coming and (steps % 3 == 0 or not host.busy):
            host.submit(coming.pop(0))
        if steps == 15:
            host.cancel(Cancel(StreamId(3)))
        if steps == 40:
            host.shrink(0)
        if steps == hit_at:
            print("hit", flush=True)  # noqa: T201 - for the test
            os.kill(pid_of(ranks - 1), number)
        if host.busy:
            host.step()
        steps += 1
    host.end_streams(ShuttingDown())
    host.rest()
    nbytes = host.figures().mlx_active_nbytes
    tokens = {str(n): sink.ids for n, sink in sinks.items()}
    errors = [sink.error for sink in sinks.values() if sink.error]
    whole = {"ids": tokens, "errors": errors, "nbytes": nbytes, "steps": steps}
    options.out.write_text(json.dumps(whole))


if __name__ == "__main__":
    main()
