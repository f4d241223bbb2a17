"""Run mixes of streams through a host of one rank or of several; a process of its own.

`python -m tests.soak.rank_mix_run RANKS MIXES OUT`: mixes as `test_rank_mixes` writes them, one
after another through one host; each stream's tokens come back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlxd_shared
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import ShuttingDown
from mlxd_shared.domain.requests import LoadSpec, Sampling
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.engine.request import Cancel, StreamId, Submit
from mlxd_worker.machine.backend import prepare_backend
from mlxd_worker.thread.facts import Loaded, LoadJob
from tests.worker.distributed.holding import hold
from tests.worker.distributed.leading import lead
from tests.worker.distributed.rank_run import Heard

DEMO = Path(mlxd_shared.__file__).parent / "demo_model"


def request_of(
    number: int, member: dict[str, Any], prompt: list[int], sink: Heard, formats: Constraints
) -> Submit:
    """Return a member's stream."""
    drawn = member["temperature"] > 0
    return Submit(
        stream=StreamId(number),
        prompt=tuple(prompt),
        sampling=Sampling(
            temperature=member["temperature"],
            top_k=40 if drawn else 0,
            top_p=0.9 if drawn else 1.0,
            min_p=0.0,
            seed=member["seed"],
            repetition_penalty=member["penalty"],
        ),
        max_tokens=member["tokens"],
        submitted_s=0.0,
        sink=sink,
        top_logprobs=member["logprobs"],
        speculation_depth=member["guesses"],
        priority=member["priority"],
        constraint=None if member["held"] is None else hold(formats, member["held"]),
    )


def run_mix(host: Any, loaded: Loaded, mix: dict[str, Any], first: int) -> list[list[int]]:
    """Run one mix to its end; return the tokens of its streams, in their order."""
    members = mix["members"]
    sinks = [Heard() for _ in members]
    coming = sorted(range(len(members)), key=lambda at: (members[at]["arrives"], at))
    steps = 0
    while coming or host.busy:
        while coming and (members[coming[0]]["arrives"] <= steps or not host.busy):
            at = coming.pop(0)
            prompt = loaded.tokenizer.encode(members[at]["text"])
            request = request_of(first + at, members[at], prompt, sinks[at], loaded.constraints)
            host.submit(request)
        for at, member in enumerate(members):
            if steps == member["leaves"]:
                host.cancel(Cancel(StreamId(first + at)))
        if steps == mix["shrinks"]:
            host.shrink(0)
        if host.busy:
            host.step()
        steps += 1
    host.end_streams(ShuttingDown())
    host.rest()
    errors = [sink.error for sink in sinks if sink.error]
    assert not errors, errors
    return [sink.ids for sink in sinks]


def main() -> None:
    """Run all mixes."""
    ranks, mixes, out = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    prepare_backend()
    from mlxd_worker.thread.host import ModelHost  # noqa: PLC0415 - after the BLAS

    host = ModelHost(device=DeviceKind.CPU) if ranks == 1 else lead(ranks)
    loaded = host.load(LoadJob(DEMO, "demo", "d" * 64, LoadSpec(rows_max=6)), lambda _: None)
    listed = json.loads(mixes.read_text())
    results = [run_mix(host, loaded, mix, 100 * at) for at, mix in enumerate(listed)]
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
