"""What a load of a model that sees is said to need, against what looking at pictures takes.

Invariants:
- A point is a first load in a process of its own, as in `fit_truth`; then one stream after another
  shows a picture that becomes exactly so many places, and its context is full of it. As many are
  shown as features are kept of, so that nothing is counted for images that never come.
- The process that decodes pictures counts: its peak is added to its worker's, though they are not
  at the same moment.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_controller.launcher.environment import own_environment
from mlxd_controller.store.folder import read_folder
from mlxd_models.fit.plan import Plan
from mlxd_models.fit.planner import plan_load
from mlxd_shared import config
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.wire.convert import WEIGHTS_TO_PB
from tests.support.fit_truth import MACHINE, peak_rss
from tests.support.made_weights import write_weights
from tests.support.seeing import add_place, encode_image, picture
from tests.support.tiny_model import write_json
from tests.support.worker_process import WorkerProcess, running_worker

TOKENS = 4
WATCH_S = 0.05
WORDS = 64
"""Room in the context beside a picture."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A model that sees, and the pictures that it is shown, one after another."""

    name: str
    config_json: Mapping[str, Any]
    settings: Mapping[str, Any]
    pictures: tuple[tuple[int, int], ...]
    """Width and height of each, in pixels; from the first again where they are too few."""
    places: int
    """That the largest one takes."""
    rows: int = 1
    """How many streams show one at the same moment."""
    stored: str = "float32"
    place: Callable[[Path], None] = add_place
    """Teaches a folder's tokenizer and config what stands for an image, and writes the template."""

    def write(self, folder: Path) -> Path:
        """Write the model with tokenizer, template and settings; return `folder`."""
        write_weights(folder, self.config_json, stored=self.stored)
        self.place(folder)
        write_json(folder / "preprocessor_config.json", dict(self.settings))
        return folder


@dataclass(frozen=True, slots=True)
class Truth:
    """An estimate and what came of it, in bytes."""

    point: Seen
    plan: Plan
    mlx_peak_nbytes: int
    rss_peak_nbytes: int
    child_peak_nbytes: int

    @property
    def device_ratio(self) -> float:
        """What MLX was said to hold, over what it held."""
        pooled = sum(term.nbytes for term in self.plan.terms if term.name == "pool")
        return (self.plan.arrays_bytes - pooled) / self.mlx_peak_nbytes

    @property
    def total_ratio(self) -> float:
        """The whole need, over what both processes had in memory."""
        return self.plan.need_bytes / (self.rss_peak_nbytes + self.child_peak_nbytes)

    def row(self) -> str:
        """Return a row of the table."""
        terms = " ".join(f"{term.name} {term.nbytes / 1e6:.1f}" for term in self.plan.terms)
        return (
            f"| {self.point.name} | {terms} | {self.mlx_peak_nbytes / 1e6:.1f} |"
            f" {self.device_ratio:.3f} | {self.plan.need_bytes / 1e6:.1f} |"
            f" {self.rss_peak_nbytes / 1e6:.1f} + {self.child_peak_nbytes / 1e6:.1f} |"
            f" {self.total_ratio:.3f} |"
        )


async def measure(point: Seen, folder: Path) -> Truth:
    """Write the point's model into `folder`, plan it, load it, and show it all pictures."""
    facts = read_folder(point.write(folder)).facts
    context = 1 << math.ceil(math.log2(point.places + WORDS))
    spec = LoadSpec(context_length=context, rows_max=point.rows, prefix_cache_nbytes=0)
    plan = plan_load(facts, spec, MACHINE)
    async with running_worker(environ=own_environment()) as worker:
        await worker.load(
            folder,
            context_length=plan.context_length,
            rows_max=plan.rows_max,
            weights=WEIGHTS_TO_PB[plan.weights],
            prefix_cache_bytes=plan.prefix_bytes,
        )
        readers: dict[int, int] = {}
        over = threading.Event()
        watching = asyncio.create_task(asyncio.to_thread(_watch, worker.pid, readers, over))
        most = 0
        for first in range(0, config.IMAGE_FEATURES_KEPT_MAX, point.rows):
            numbers = range(first, min(first + point.rows, config.IMAGE_FEATURES_KEPT_MAX))
            counts = await asyncio.gather(*(_show(worker, point, number) for number in numbers))
            most = max(most, *counts)
        over.set()
        await watching
        assert point.places < most < point.places + WORDS
        status = await worker.fresh_status()
        return Truth(
            point,
            plan,
            mlx_peak_nbytes=status.memory.mlx_peak_bytes,
            rss_peak_nbytes=peak_rss(worker.pid),
            child_peak_nbytes=sum(
                sorted(readers.values())[-min(config.IMAGE_READS_MAX, point.rows) :]
            ),
        )


async def _show(worker: WorkerProcess, point: Seen, number: int) -> int:
    """Show a picture; return how many tokens the prompt had."""
    width, height = point.pictures[number % len(point.pictures)]
    content = await asyncio.to_thread(_jpeg, number, width, height)
    parts = [
        inference_pb2.ContentPart(image=content),
        inference_pb2.ContentPart(text="what is it?"),
    ]
    request = inference_pb2.GenerateRequest(
        model="tiny",
        chat=inference_pb2.ChatPrompt(
            messages=[inference_pb2.ChatMessage(role="user", parts=parts)]
        ),
        max_tokens=TOKENS,
        ignore_eos=True,
        sampling=types_pb2.SamplingOptions(temperature=0.0),
    )
    answers = [answer async for answer in worker.inference.Generate(request)]
    return answers[-1].usage.prompt_tokens


def _jpeg(number: int, width: int, height: int) -> bytes:
    return encode_image(picture(number, width=width, height=height), "JPEG", quality=90)


def _watch(pid: int, peaks: dict[int, int], over: threading.Event) -> None:
    """Keep the largest resident set of each process that decodes pictures, until it is over."""
    while not over.wait(WATCH_S):
        for child in psutil.Process(pid).children():
            with suppress(psutil.Error, OSError, StopIteration):
                if any("image_process" in part for part in child.cmdline()):
                    peaks[child.pid] = max(peaks.get(child.pid, 0), peak_rss(child.pid))
