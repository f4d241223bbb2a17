"""`mlxd bench`: how fast a model is here, by itself, served, and beside mlx-lm."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mlxd_controller.bench import ways
from mlxd_controller.bench.cells import Figure, Plan, figure_of, plan_of, prompts_of
from mlxd_controller.bench.report import HEADINGS, report_of, table_rows
from mlxd_controller.cli import options as o
from mlxd_controller.cli.completion import named_model
from mlxd_controller.cli.configuration.loads import folders_of
from mlxd_controller.cli.configuration.reading import load_configuration
from mlxd_controller.cli.grouping import ask_server
from mlxd_controller.cli.outcome import ExitCode, complain, model_argument
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.stores import Stores
from mlxd_controller.cli.terminal import show
from mlxd_controller.demo import NotServed
from mlxd_controller.runtime.ports import ModelRef
from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.shelves import DEMO_NAME, demo_model, library_of
from mlxd_models.families.foreign import MLX_LM
from mlxd_models.families.foreign_parts import installed_version
from mlxd_shared.domain.requests import Weights


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    prompt: Annotated[str, typer.Option(help="Tokens of each prompt; several with commas.")] = "128"
    rows: Annotated[str, typer.Option(help="Streams side by side; several with commas.")] = "1"
    tokens: Annotated[int, typer.Option(help="Tokens that each stream generates.")] = 128
    runs: Annotated[int, typer.Option(help="Runs of which the median counts.")] = 3
    weights: Annotated[Weights, typer.Option(help="The form of the weights in memory.")] = (
        Weights.AUTO
    )


Model = Annotated[str, named_model("A name, alias or digest, or a folder such as ./m.")]
Running = Annotated[
    bool,
    typer.Option(
        "--server", help="Ask the server at --address, instead of one that is started for this."
    ),
]
Peer = Annotated[bool, typer.Option(help="Measure mlx-lm too, where it is installed.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write a report to share: nothing private in it."),
]


@ask_server
async def bench(
    model: Model,
    *,
    sizes: Sizes,
    running: Running = False,
    peer: Peer = True,
    stores: Stores,
    out: Out = None,
    as_json: o.Json = False,
    where: Server,
) -> ExitCode | None:
    """Time prefill and decoding of a model: its engine alone, served with clients, and mlx-lm.

    Each way computes in processes of its own, one after the other. Figures are medians; those of
    `served` include everything between a client and its tokens.
    """
    plan = plan_of(sizes.prompt, sizes.rows, new_tokens=sizes.tokens, runs=sizes.runs)
    ref = await _find(model_argument(model), stores.places(os.environ))
    server = _running(where, model, plan, sizes.weights)
    if not running:
        server = ways.temporary_server(ref.path, plan, sizes.weights)
    try:
        figures, facts = await _measure_all(ref.path, plan, sizes.weights, server, quiet=as_json)
        if peer and installed_version(MLX_LM) is not None:
            figures += await _measure_peer(ref.path, plan, facts, quiet=as_json)
    except (NotServed, ways.WayFailed) as error:
        complain(str(error))
        return ExitCode.ERROR
    report = report_of(figures, plan, digest=ref.digest, facts=facts)
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if as_json:
        show.json_line(report)
    else:
        show.table(HEADINGS, table_rows(figures), right=HEADINGS[1:], spare=HEADINGS[-1:])
    return None


async def _measure_all(
    path: Path,
    plan: Plan,
    weights: Weights,
    server: AbstractAsyncContextManager[ways.ServedWay],
    *,
    quiet: bool,
) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures of our own two ways, and what the engine said of itself."""
    async with ways.engine_alone(path, plan, weights) as engine:
        facts = engine.facts
        figures = await _measure(ways.ENGINE, engine, plan, facts, quiet=quiet)
    async with server as served:
        figures += await _measure(ways.SERVED, served, plan, facts, quiet=quiet)
    return figures, facts


async def _find(name: str, places: StorePlaces) -> ModelRef:
    """Return the model: a folder's, one that the configuration file names, or one of the stores.

    Raises:
        MlxdError: there is none, or it cannot be served.
    """
    path = Path(name)
    if path.is_absolute():
        return await library_of([("folder", path)], places).resolve("folder")
    folders = dict(folders_of(load_configuration(os.environ)))
    return await library_of(({DEMO_NAME: demo_model()} | folders).items(), places).resolve(name)


@asynccontextmanager
async def _running(
    where: Server, model: str, plan: Plan, weights: Weights
) -> AsyncIterator[ways.ServedWay]:
    """Have the server that runs load the model; it keeps it as it keeps others."""
    async with where.client() as client:
        name = await ways.load_for(client, model_argument(model), plan, weights)
        yield ways.ServedWay(client, where.address, name, where.security)


async def _measure_peer(
    path: Path, plan: Plan, facts: dict[str, Any], *, quiet: bool
) -> list[Figure]:
    """Measure mlx-lm if it can load the model, one stream at a time, as it serves them."""
    alone = tuple(cell for cell in plan.cells if cell.rows == 1)
    if not alone:
        return []
    dtype = "float32" if facts["weights"] == Weights.FLOAT32.value else "stored"
    try:
        async with ways.peer_alone(path, dtype=dtype) as way:
            single = Plan(alone, plan.new_tokens, plan.runs)
            return await _measure(ways.PEER, way, single, facts, quiet=quiet)
    except ways.WayFailed as error:
        complain(f"mlx-lm is left out: {error}")
        return []


async def _measure(
    name: str, way: ways.Way, plan: Plan, facts: dict[str, Any], *, quiet: bool
) -> list[Figure]:
    """Return one way's figures, cell by cell."""
    figures = []
    for cell in plan.cells:
        runs = []
        for number, prompts in enumerate(prompts_of(plan, cell, facts["vocab_size"])):
            size = f"{cell.rows} x {cell.prompt_tokens} tokens"
            show.step(f"{name}: {size}, run {number} of {plan.runs}", quiet=quiet)
            runs.append(await way.run(prompts, plan.new_tokens))
        figures.append(figure_of(name, cell, runs))
    show.step("", quiet=quiet)
    return figures
