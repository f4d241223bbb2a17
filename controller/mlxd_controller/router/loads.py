"""How busy a model is, as routers read it: once, and as records that are pushed. Pure.

Invariants:
- Tokens in use are those of running streams; what a model keeps of former prompts can be released,
  and is not among them.
- Requests that wait for their model to be loaded count as waiting.
- Nothing is said of what mlxd does not know, such as a rate of tokens.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import Message
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from mlxd_shared.domain.figures import WorkerFigures

SECTIONS = frozenset({"core", "all"})
"""Those of a GetLoadsRequest that have something to say here."""


@dataclass(frozen=True, slots=True)
class Load:
    """One model's; `rows` is 0 where it is not loaded. `age_s`: since when the figures hold."""

    running: int = 0
    waiting: int = 0
    tokens: int = 0
    tokens_max: int = 0
    rows: int = 0
    age_s: float = 0.0

    @property
    def usage(self) -> float:
        """The share of its tokens that is in use, 0 to 1."""
        return min(1.0, self.tokens / self.tokens_max) if self.tokens_max else 0.0


def load_of(workers: Sequence[WorkerFigures], *, calls: int, age_s: float = 0.0) -> Load:
    """Return a model's load by what its living workers reported `age_s` ago.

    calls: how many of its requests the router has under way here, whether or not it is loaded.
    """
    running = sum(each.streams_running for each in workers)
    waiting = sum(each.streams_waiting for each in workers)
    return Load(
        running=running,
        waiting=max(waiting, calls - running),
        tokens=sum(each.kv_tokens_used for each in workers),
        tokens_max=sum(each.kv_tokens_capacity for each in workers),
        rows=sum(each.rows_max for each in workers),
        age_s=age_s,
    )


def loads_to_pb(load: Load, *, unix_s: float, version: str) -> Message:
    """Return the answer to GetLoads."""
    one = pb.SchedulerLoad(
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=load.tokens,
        max_total_num_tokens=load.tokens_max,
        token_usage=load.usage,
        utilization=load.running / load.rows if load.rows else 0.0,
        max_running_requests=load.rows,
    )
    made: Message = pb.GetLoadsResponse(
        timestamp=dt.datetime.fromtimestamp(unix_s, dt.UTC).isoformat(),
        version=version,
        dp_rank_count=1,
        loads=[one],
    )
    return made


def record_to_pb(load: Load, *, sample: int, unix_s: float) -> Message:
    """Return a batch without events that carries a load, the `sample`-th of its stream."""
    record = common_pb2.EngineLoad(
        running_requests=load.running,
        waiting_requests=load.waiting,
        token_usage=load.usage,
        active_token_usage=load.usage,
        max_running_requests=load.rows,
        age_ms=round(load.age_s * 1000),
        sample=sample,
        load_only=True,
        num_used_tokens=load.tokens,
        max_total_num_tokens=load.tokens_max,
    )
    made: Message = common_pb2.KvEventBatch(timestamp=unix_s, load=record)
    return made
