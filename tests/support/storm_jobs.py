"""Six models for a storm, requests of them, what each gets alone, and memory for half of them.

Invariants:
- Models differ in architecture, width and digest; their needs lie near enough together that the
  three largest fit where no four do.
- What a request gets alone is what a server with memory for all gives it, with nobody beside it.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from mlxd import Client
from mlxd_shared import config
from tests.bench.models import Shape
from tests.support.random_model import (
    write_dense_model,
    write_hybrid_model,
    write_sliding_model,
)
from tests.support.served import serve
from tests.support.storm import stream_of
from tests.support.storm_tally import Got, Job
from tests.support.tiny_model import write_json, write_tiny_model
from tests.support.trained import DEMO

ROOM_FOR = 3
DEMO_CONTEXT = 256
"""Less than its own, so that it needs little more memory than the others; a digest of its own."""
PROMPTS = (
    "Once upon a time",
    "Once upon a time there was a little girl named Lily. She had a big red ball and",
    "One day the dog and the cat went to the park. They saw a bird in a tree. The bird",
    "x",
)
"""How requests begin; a number makes each one its own. So some begin alike, and reuse prefixes."""
MAX_TOKENS = (1, 10, 40, 100)
TEMPERATURES = (0.0, 0.8)
PREFIX_TERM = "prefix"


@dataclass(frozen=True, slots=True)
class Scene:
    """The models by name, the requests with what they get alone, and a limit of memory."""

    folders: dict[str, Path]
    jobs: tuple[Job, ...]
    limit_nbytes: int

    @property
    def options(self) -> tuple[str, ...]:
        """The models on the command line of `mlxd serve`."""
        named = (("--model", f"{name}={folder}") for name, folder in self.folders.items())
        return tuple(word for words in named for word in words)


def write_models(folder: Path) -> dict[str, Path]:
    """Write six models into `folder`; return them by name."""
    demo = Path(shutil.copytree(DEMO, folder / "demo"))
    written = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    write_json(demo / "config.json", written | {"max_position_embeddings": DEMO_CONTEXT})
    wide = Shape(hidden=64, layers=5, heads=8, kv_heads=4, mlp=172, context=512)
    return {
        "a-demo": demo,
        "b-tiny": write_tiny_model(folder / "tiny", context_max=512),
        "c-wide": write_dense_model(folder / "wide", shape=wide, seed=3),
        "d-sliding": write_sliding_model(folder / "sliding", window=64, mixed=True, seed=4),
        "e-hybrid": write_hybrid_model(folder / "hybrid", seed=5),
        "f-other": write_tiny_model(folder / "other", context_max=400, seed=6),
    }


async def scene(folder: Path, *, each: int, seed: int) -> Scene:
    """Make the models and `each` requests of every one, run these alone, and reckon the limit."""
    crowd_scene = Scene(write_models(folder), (), 0)
    draws = random.Random(seed)
    wanted = {name: [_draw_job(name, draws) for _ in range(each)] for name in crowd_scene.folders}
    async with serve(*crowd_scene.options) as server, Client(server.address) as client:
        needs = [await _least_nbytes(client, name) for name in crowd_scene.folders]
        jobs_by_model = await asyncio.gather(*(_alone(client, jobs) for jobs in wanted.values()))
    jobs = tuple(job for of_model in jobs_by_model for job in of_model)
    return replace(crowd_scene, jobs=jobs, limit_nbytes=_limit_nbytes(needs))


def _draw_job(model: str, draws: random.Random) -> Job:
    return Job(
        model=model,
        prompt=f"{draws.choice(PROMPTS)} {draws.randrange(1000)}",
        temperature=draws.choice(TEMPERATURES),
        seed=draws.getrandbits(32),
        max_tokens=draws.choice(MAX_TOKENS),
    )


async def _alone(client: Client, jobs: list[Job]) -> list[Job]:
    """Run the requests of one model one after another; return them with what they got."""
    answered = []
    for job in jobs:
        got = Got(job, time.monotonic())
        async with stream_of(client, job) as stream:
            async for event in stream:
                got.hear(event)
        assert len(got.token_ids) == job.max_tokens
        answered.append(replace(job, token_ids=tuple(got.token_ids), text=got.text))
    return answered


async def _least_nbytes(client: Client, model: str) -> int:
    """Return what a model needs at least: all but a prefix cache."""
    report = await client.fit(model)
    return sum(term.nbytes for term in report.terms if term.name != PREFIX_TERM)


def _limit_nbytes(needs: list[int]) -> int:
    """Return memory in which the three largest fit, with what the first keep of prefixes."""
    rising = sorted(needs)
    limit = int(sum(rising[-ROOM_FOR:]) / (1 - (ROOM_FOR - 1) * config.PREFIX_MEMORY_FRACTION)) + 1
    assert sum(rising[: ROOM_FOR + 1]) > limit, needs
    return limit
