"""`mlxd load` and `mlxd fit`: load a model, or only check whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from mlxd.messages import Absence, FitReport, Model
from mlxd_controller.cli import options as o
from mlxd_controller.cli.completion import named_model
from mlxd_controller.cli.grouping import Work, ask_or_start_server, ask_server
from mlxd_controller.cli.outcome import ExitCode, complain, model_argument
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.terminal import show
from mlxd_controller.cli.terminal.progress import ByteBar
from mlxd_shared.config import PREFIX_MEMORY_FRACTION
from mlxd_shared.domain.errors import ModelNotFound
from mlxd_shared.domain.requests import KVFormat, LoadSpec, Weights
from mlxd_shared.domain.units import format_bytes

ModelOrPath = Annotated[
    str,
    named_model("A name, alias or digest, or a model folder such as ./my-model.", metavar="MODEL"),
]
Name = Annotated[
    str,
    typer.Option(
        help="The name to serve a folder under.  [default: the folder's]", show_default=False
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


@dataclass(frozen=True, slots=True)
class Form:
    """How a model is to live in memory."""

    context_length: Annotated[
        int | None, typer.Option("--context", help="Tokens of prompt and completion together.")
    ] = None
    rows: Annotated[int | None, typer.Option(help="Streams decoded side by side.")] = None
    weights: Annotated[Weights, typer.Option(help="The form of the weights in memory.")] = (
        Weights.AUTO
    )
    kv_format: Annotated[
        KVFormat | None,
        typer.Option(
            "--kv-format",
            help="The form of keys and values in memory.  [default: as the model computes]",
            show_default=False,
        ),
    ] = None
    prefix_cache: Annotated[
        int | None,
        typer.Option(
            "--prefix-cache",
            parser=o.size,
            metavar="SIZE",
            help="Memory for snapshots of earlier prompts; 0 keeps none."
            f"  [default: {PREFIX_MEMORY_FRACTION:.0%} of the device's memory, or what fits]",
            show_default=False,
        ),
    ] = None

    ranks: Annotated[
        int | None,
        typer.Option(
            help="Processes that share the model, a device each: 1, 2, 4 or 8."
            "  [default: as few as can]",
            show_default=False,
        ),
    ] = None

    def spec(self) -> LoadSpec:
        """Return what is asked of a load so far."""
        return LoadSpec(
            context_length=self.context_length,
            rows_max=self.rows,
            weights=self.weights,
            kv_format=self.kv_format,
            prefix_cache_nbytes=self.prefix_cache,
            ranks=self.ranks or None,
        )


@ask_or_start_server
def load(
    model: ModelOrPath,
    *,
    name: Name = "",
    form: Form,
    keep_alive: o.KeepAlive = None,
    pin: Pin = False,
    priority: Priority = None,
    sampling: o.Sampling,
    as_json: o.Json = False,
    where: Server,
) -> Work:
    """Load a model and show its progress. Sampling options become the model's defaults."""
    spec = replace(
        form.spec(),
        sampling=sampling.values(),
        keep_alive_s=keep_alive,
        pinned=True if pin else None,
        priority=priority,
    )
    return _load(where, model, name, spec, as_json=as_json)


async def _load(where: Server, model: str, name: str, spec: LoadSpec, *, as_json: bool) -> None:
    loaded: Model | None = None
    async with where.client() as client:
        try:
            async with client.load(model_argument(model), name=name, options=spec) as updates:
                with ByteBar("waiting", quiet=as_json) as bar:
                    async for update in updates:
                        loaded = update.model
                        bar.show_load(loaded)
                        if as_json:
                            show.json_line(update)
        except ModelNotFound as error:
            raise _with_hint(error, model) from error
    assert loaded is not None  # a load without an update raises
    if not as_json:
        typer.echo(
            f"{loaded.name} is {show.state(loaded)}: {format_bytes(loaded.resident_nbytes)}"
            f" on {loaded.device}, context {loaded.context_length}, {loaded.rows_max} rows,"
            f" {show.form(loaded)}"
        )


@ask_server
async def fit(
    model: ModelOrPath, *, form: Form, as_json: o.Json = False, where: Server
) -> ExitCode:
    """Show the memory that a model needs, term by term, and whether it fits. Loads nothing.

    Exit code 5: the model can never fit.
    """
    async with where.client() as client:
        try:
            report = await client.fit(model_argument(model), options=form.spec())
        except ModelNotFound as error:
            raise _with_hint(error, model) from error
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
            ("total", str(report.need_nbytes), format_bytes(report.need_nbytes), _whose(report)),
        ],
        right=("bytes", "size"),
    )
    typer.echo()
    lines = {
        "model": f"{report.model} {show.short(report.model_digest)}".rstrip(),
        "plan": (
            f"{show.form(report)}, context {report.context_length}, {report.rows_max} rows,"
            f" on {report.device}"
        ),
        "budget": format_bytes(report.budget_nbytes),
        "available now": format_bytes(report.available_nbytes),
        "held in reserve": format_bytes(report.reserve_nbytes),
        "verdict": _verdict(report),
        "would evict": ", ".join(_cost(absence) for absence in report.absences),
    }
    show.fields(lines.items())
    for suggestion in report.suggestions:
        complain(f"to make it fit: {suggestion}")


def _whose(report: FitReport) -> str:
    return f"of each of {report.ranks} ranks, as all that follows" if report.ranks > 1 else ""


def _cost(absence: Absence) -> str:
    """Return who goes, and what that costs whoever asks for it next."""
    prompts = f", prompts {absence.prompts_s:.1f} s" if absence.prompts_s else ""
    return f"{absence.model} (reload {absence.reload_s:.1f} s{prompts})"


def _verdict(report: FitReport) -> str:
    if report.fits_now:
        return "fits now"
    return "fits after evicting" if report.fits_ever else "can never fit"
