"""What a load is said to need against what a real worker takes at its peak.

Invariants:
- A point is a first load in a process of its own: nothing is remembered of an earlier one.
- The peak is over all of its life: the load, the warm-up, and all rows at full context at once.
- The worker is started as the controller starts it, and told what the controller has planned.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_controller.launcher.environment import own_environment
from mlxd_controller.store.folder import read_folder
from mlxd_models.fit.plan import Device, Plan
from mlxd_models.fit.planner import plan_load
from mlxd_shared.config import GIB
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.requests import KVFormat, LoadSpec, Weights
from mlxd_shared.wire.convert import KV_FORMAT_TO_PB, WEIGHTS_TO_PB
from tests.bench.models import Shape
from tests.support.made_weights import write_weights
from tests.support.random_model import decoder_config, expert_hybrid_config, latent_config
from tests.support.tiny_model import VOCAB
from tests.support.worker_process import WorkerProcess, running_worker

RATIO_MIN, RATIO_MAX = 0.97, 1.10
"""Of an estimate over what was measured, above 200 MB."""

MACHINE = Device("cpu", DeviceKind.CPU, 64 * GIB, 0, 64 * GIB, 64 * GIB)
GENERATED = 4
"""The part of the context that is generated, as its reciprocal: rows meet in it."""
FILLS_MAX = 5
"""A machine that stalls lets some rows come late."""
LAST_TOKENS = 8
"""What is left of the context to a prompt that fills it."""

HYBRID: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "mistral": "MistralForCausalLM",
}
OTHERS = {"deepseek_v3": latent_config, "qwen3_next": expert_hybrid_config}
"""Architectures whose widths follow from the shape by rules of their own."""


@dataclass(frozen=True, slots=True)
class Point:
    """One model, how it is stored, and how it is to live."""

    architecture: str
    stored: str
    context: int
    rows: int
    shape: Shape
    vocab: int = VOCAB
    window: int = 0
    kv_format: KVFormat = KVFormat.MODEL
    prefix_nbytes: int = 0
    weights: Weights = Weights.AUTO

    @property
    def name(self) -> str:
        """What tells it from the others."""
        more = f"-{self.kv_format.value}" if self.kv_format is not KVFormat.MODEL else ""
        more += f"-prefix{self.prefix_nbytes >> 20}" if self.prefix_nbytes else ""
        more += f"-v{self.vocab}" if self.vocab != VOCAB else ""
        life = f"{self.context}x{self.rows}{more}"
        more = "-as-stored" if self.weights is Weights.STORED else ""
        return f"{self.architecture}-{self.stored}{more}-{self.shape.hidden}-{life}"

    @property
    def spec(self) -> LoadSpec:
        """What is asked for."""
        return LoadSpec(
            context_length=self.context,
            rows_max=self.rows,
            weights=self.weights,
            kv_format=self.kv_format,
            prefix_cache_nbytes=self.prefix_nbytes,
        )

    def config(self) -> dict[str, Any]:
        """Return config.json."""
        more: dict[str, Any] = {"vocab_size": self.vocab}
        if self.architecture in OTHERS:
            return OTHERS[self.architecture](self.shape, **more)
        if self.architecture == "qwen3_5":
            head_dim = self.shape.hidden // self.shape.heads
            more |= HYBRID | {
                "head_dim": head_dim,
                "linear_num_key_heads": self.shape.heads // 2,
                "linear_num_value_heads": self.shape.heads,
                "linear_key_head_dim": head_dim,
                "linear_value_head_dim": head_dim,
            }
        if self.window:
            more["sliding_window"] = self.window
        return decoder_config(ARCHITECTURES[self.architecture], self.shape, **more)


@dataclass(frozen=True, slots=True)
class Truth:
    """An estimate and what came of it, in bytes."""

    point: Point
    plan: Plan
    mlx_peak_nbytes: int
    rss_peak_nbytes: int
    rss_loaded_nbytes: int
    accounts: dict[str, int] = field(default_factory=dict)

    @property
    def device_ratio(self) -> float:
        """What MLX was said to hold, over what it held."""
        pooled = sum(term.nbytes for term in self.plan.terms if term.name == "pool")
        return (self.plan.arrays_bytes - pooled) / self.mlx_peak_nbytes

    @property
    def total_ratio(self) -> float:
        """The whole need, over the resident set."""
        return self.plan.need_bytes / self.rss_peak_nbytes

    def row(self) -> str:
        """Return a row of the table."""
        terms = " ".join(f"{term.name} {term.nbytes / 1e6:.1f}" for term in self.plan.terms)
        said = self.plan.need_bytes / 1e6
        return (
            f"| {self.point.name} | {terms} | {self.mlx_peak_nbytes / 1e6:.1f} |"
            f" {self.device_ratio:.3f} | {said:.1f} | {self.rss_peak_nbytes / 1e6:.1f} |"
            f" {self.total_ratio:.3f} |"
        )


async def measure(point: Point, folder: Path) -> Truth:
    """Write the point's model into `folder`, plan it, load it, and fill all its rows."""
    write_weights(folder, point.config(), stored=point.stored)
    facts = read_folder(folder).facts
    plan = plan_load(facts, point.spec, MACHINE)
    async with running_worker(environ=own_environment()) as worker:
        await worker.load(
            folder,
            context_length=plan.context_length,
            rows_max=plan.rows_max,
            weights=WEIGHTS_TO_PB[plan.weights],
            kv_format=KV_FORMAT_TO_PB[plan.kv_format],
            prefix_cache_bytes=plan.prefix_bytes,
        )
        loaded = peak_rss(worker.pid)
        for _ in range(FILLS_MAX):
            if await fill(worker, context=plan.context_length, rows=plan.rows_max):
                break
        else:
            raise AssertionError("some row had gone before another one was there")
        status = await worker.fresh_status()
        return Truth(
            point,
            plan,
            mlx_peak_nbytes=status.memory.mlx_peak_bytes,
            rss_peak_nbytes=peak_rss(worker.pid),
            rss_loaded_nbytes=loaded,
            accounts={account.name: account.bytes for account in status.memory.accounts},
        )


async def fill(worker: WorkerProcess, *, context: int, rows: int) -> bool:
    """Bring all rows to their full context; return whether they were there all at once.

    One more comes first, with a prompt that fills its context: nobody decodes yet, so that its
    chunks are whole ones, and the others have joined by then.
    """
    generated = max(context // GENERATED, 8)
    long = _request(context - LAST_TOKENS, LAST_TOKENS, seed=rows)
    long.priority = 1
    requests = [_request(context - generated, generated, seed=row) for row in range(rows)]
    _, *spans = await asyncio.gather(*(_span(worker, request) for request in (long, *requests)))
    return max(begun for begun, _ in spans) < min(ended for _, ended in spans)


def _request(prompt: int, generated: int, *, seed: int) -> inference_pb2.GenerateRequest:
    draws = random.Random(seed)
    ids = [draws.randrange(3, VOCAB) for _ in range(prompt)]
    return inference_pb2.GenerateRequest(
        model="tiny",
        tokens=inference_pb2.TokenIds(ids=ids),
        max_tokens=generated,
        ignore_eos=True,
        sampling=types_pb2.SamplingOptions(temperature=1.0, seed=seed),
    )


async def _span(
    worker: WorkerProcess, request: inference_pb2.GenerateRequest
) -> tuple[float, float]:
    """Return when a stream's first and last message came."""
    clock = asyncio.get_running_loop().time
    begun_s = ended_s = 0.0
    tokens = 0
    async for message in worker.inference.Generate(request):
        ended_s = clock()
        begun_s = begun_s or ended_s
        tokens += len(message.token_ids)
    assert tokens == request.max_tokens, "it goes on to the end of its context"
    return begun_s, ended_s


def peak_rss(pid: int) -> int:
    """Return the largest resident set that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
