"""`mlxd load` and `mlxd fit`: load a model, or only check whether it fits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlxd.messages import FitReport, Model
from mlxd_controller.cli import options as o
from mlxd_controller.cli import show
from mlxd_controller.cli.outcome import ExitCode, complain, model_argument, run
from mlxd_controller.cli.progress import ByteBar
from mlxd_controller.cli.security import Server, server
from mlxd_shared.config import PREFIX_MEMORY_FRACTION
from mlxd_shared.domain.errors import ModelNotFound
from mlxd_shared.domain.requests import KVFormat, LoadSpec, Weights
from mlxd_shared.domain.units import format_bytes

ModelOrPath = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A name, alias or digest, or a model folder such as ./my-model."
    ),
]
Name = Annotated[
    str,
    typer.Option(
        help="The name to serve a folder under.  [default: the folder's]", show_default=False
    ),
]
ContextLength = Annotated[
    int | None, typer.Option("--context", help="Tokens of prompt and completion together.")
]
Rows = Annotated[int | None, typer.Option(help="Streams decoded side by side.")]
WeightsFormat = Annotated[Weights, typer.Option(help="The form of the weights in memory.")]
KeysAndValues = Annotated[
    KVFormat | None,
    typer.Option(
        "--kv-format",
        help="The form of keys and values in memory.  [default: as the model computes]",
        show_default=False,
    ),
]
PrefixCache = Annotated[
    int | None,
    typer.Option(
        "--prefix-cache",
        parser=o.size,
        metavar="SIZE",
        help="Memory for snapshots of earlier prompts; 0 keeps none."
        f"  [default: {PREFIX_MEMORY_FRACTION:.0%} of the device's memory, or what fits]",
        show_default=False,
    ),
]
Pin = Annotated[bool, typer.Option("--pin", help="Never evict the model to make room.")]
Priority = Annotated[
    int | None,
    typer.Option(
        min=-(1 << 31),
        max=(1 << 31) - 1,
        help="Higher is evicted later.  [default: as before, or 0]",
    ),
]


def load(
    context: typer.Context,
    model: ModelOrPath,
    *,
    name: Name = "",
    context_length: ContextLength = None,
    rows: Rows = None,
    weights: WeightsFormat = Weights.AUTO,
    kv_format: KeysAndValues = None,
    prefix_cache: PrefixCache = None,
    keep_alive: o.KeepAlive = None,
    pin: Pin = False,
    priority: Priority = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = None,
    frequency_penalty: o.FrequencyPenalty = None,
    repeat_last_n: o.RepeatLastN = None,
    xtc_probability: o.XtcProbability = None,
    xtc_threshold: o.XtcThreshold = None,
    seed: o.Seed = None,
    logit_bias: o.LogitBias = None,
    as_json: o.Json = False,
    address: o.Address = None,
) -> None:
    """Load a model and show its progress. Sampling options become the model's defaults."""
    spec = LoadSpec(
        context_length=context_length,
        rows_max=rows,
        weights=weights,
        sampling=o.sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repeat_last_n=repeat_last_n,
            xtc_probability=xtc_probability,
            xtc_threshold=xtc_threshold,
            seed=seed,
            logit_bias=logit_bias,
        ),
        keep_alive_s=keep_alive,
        pinned=True if pin else None,
        priority=priority,
        kv_format=kv_format,
        prefix_cache_nbytes=prefix_cache,
    )
    where = server(context, address)
    run(_load(where, model, name=name, spec=spec, as_json=as_json), address=where.address)


async def _load(where: Server, text: str, *, name: str, spec: LoadSpec, as_json: bool) -> ExitCode:
    model: Model | None = None
    async with where.client() as client:
        try:
            async with client.load(model_argument(text), name=name, options=spec) as updates:
                with ByteBar("waiting", quiet=as_json) as bar:
                    async for update in updates:
                        model = update.model
                        bar.show_load(model)
                        if as_json:
                            show.json_line(update)
        except ModelNotFound as error:
            raise _with_hint(error, text) from error
    assert model is not None  # a load without an update raises
    if not as_json:
        typer.echo(
            f"{model.name} is {show.state(model)}: {format_bytes(model.resident_nbytes)}"
            f" on {model.device}, context {model.context_length}, {model.rows_max} rows,"
            f" {show.form(model)}"
        )
    return ExitCode.OK


def fit(
    context: typer.Context,
    model: ModelOrPath,
    *,
    context_length: ContextLength = None,
    rows: Rows = None,
    weights: WeightsFormat = Weights.AUTO,
    kv_format: KeysAndValues = None,
    prefix_cache: PrefixCache = None,
    as_json: o.Json = False,
    address: o.Address = None,
) -> None:
    """Show the memory that a model needs, term by term, and whether it fits. Loads nothing.

    Exit code 5: the model can never fit.
    """
    spec = LoadSpec(
        context_length=context_length,
        rows_max=rows,
        weights=weights,
        kv_format=kv_format,
        prefix_cache_nbytes=prefix_cache,
    )
    where = server(context, address)
    run(_fit(where, model, spec=spec, as_json=as_json), address=where.address)


async def _fit(where: Server, text: str, *, spec: LoadSpec, as_json: bool) -> ExitCode:
    async with where.client() as client:
        try:
            report = await client.fit(model_argument(text), options=spec)
        except ModelNotFound as error:
            raise _with_hint(error, text) from error
    if as_json:
        show.json_line(report)
    else:
        _show_report(report)
    return ExitCode.OK if report.fits_ever else ExitCode.NO_FIT


def _with_hint(error: ModelNotFound, text: str) -> ModelNotFound:
    if not Path(text).is_dir():
        return error
    return ModelNotFound(error.model, f"for the folder that is here, write ./{text}")


def _show_report(report: FitReport) -> None:
    show.table(
        ("term", "bytes", "size", "note"),
        [
            *(
                (term.name, str(term.nbytes), format_bytes(term.nbytes), term.note)
                for term in report.terms
            ),
            ("total", str(report.need_nbytes), format_bytes(report.need_nbytes), ""),
        ],
        right=("bytes", "size"),
    )
    typer.echo()
    show.fields(
        (
            ("model", f"{report.model} {show.short(report.model_digest)}".rstrip()),
            (
                "plan",
                (
                    f"{show.form(report)}, context {report.context_length},"
                    f" {report.rows_max} rows, on {report.device}"
                ),
            ),
            ("budget", format_bytes(report.budget_nbytes)),
            ("available now", format_bytes(report.available_nbytes)),
            ("held in reserve", format_bytes(report.reserve_nbytes)),
            ("verdict", _verdict(report)),
            ("would evict", ", ".join(report.would_evict)),
        )
    )
    for suggestion in report.suggestions:
        complain(f"to make it fit: {suggestion}")


def _verdict(report: FitReport) -> str:
    if report.fits_now:
        return "fits now"
    return "fits after evicting" if report.fits_ever else "can never fit"
