"""`mlxd serve`: the controller itself, in the foreground unless it is detached."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TextIO

import typer

from mlxd_controller.cli import options as o
from mlxd_controller.cli.background.detaching import DETACHED_VARIABLE, detach
from mlxd_controller.cli.configuration.environment import (
    KEEP_ALIVE_VARIABLE,
    LOAD_TIMEOUT_VARIABLE,
    keep_alive_s,
    load_timeout_s,
)
from mlxd_controller.cli.configuration.loads import folders_of, specs_of
from mlxd_controller.cli.configuration.reading import Configuration
from mlxd_controller.cli.fleet import Fleet
from mlxd_controller.cli.grouping import spread_groups
from mlxd_controller.cli.http import Http
from mlxd_controller.cli.outcome import run, usage_error
from mlxd_controller.cli.router import Router
from mlxd_controller.cli.security import Attached, Listener, named_workers
from mlxd_controller.cli.stores import KeptPrompts, Stores
from mlxd_controller.gateway import check_usable
from mlxd_controller.settings import Limits, ServeSettings
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.domain.units import format_duration, parse_bytes
from mlxd_shared.ops import logs

LISTENING = "mlxd listens on "
"""What the first line on stdout begins with; the address follows."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The options that concern neither stores nor security."""

    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|unix:PATH",
            help="Where to listen; port 0 picks a free port.  [env var: MLXD_ADDRESS]",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="[NAME=]PATH",
            help="A model folder to offer; repeatable.  [default: the built-in model, as demo]",
        ),
    ] = None
    memory_limit: Annotated[
        int | None,
        typer.Option(
            parser=o.size, metavar="SIZE", help="Memory for all models on a device, such as 12G."
        ),
    ] = None
    reserve: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|PERCENT",
            help="Memory to keep free, beyond what other programs use, such as 2G or 10%."
            f"  [default: {config.MEMORY_RESERVE_FRACTION:.0%}]",
        ),
    ] = None
    gpu_overhead: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|PERCENT",
            help="Memory to keep free on each GPU in addition, such as 1G or 5%; ignored on a CPU."
            "  [default: 0]",
            show_default=False,
        ),
    ] = None
    keep_alive: Annotated[
        float | None,
        o.duration_option(
            "How long an idle model stays loaded; -1: forever, 0: not at all."
            f"  [env var: {KEEP_ALIVE_VARIABLE}]"
            f"  [default: {format_duration(config.KEEP_ALIVE_DEFAULT_S)}]"
        ),
    ] = None
    max_loaded: Annotated[
        int | None, typer.Option(min=1, help="The most models in memory.  [default: what fits]")
    ] = None
    waiting_max: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=config.WAITING_STREAMS_LIMIT,
            help="How many streams of a model may wait while others run; more are told when to come"
            f" back.  [default: {config.WAITING_STREAMS_MAX}]",
        ),
    ] = None
    load_timeout: Annotated[
        float | None,
        o.duration_option(
            "Abort a load without progress for this long; 0 and -1: never."
            f"  [env var: {LOAD_TIMEOUT_VARIABLE}]"
            f"  [default: {format_duration(config.LOAD_STALL_TIMEOUT_S)}]"
        ),
    ] = None
    worker_silent_timeout: Annotated[
        float,
        o.duration_option(
            "End a worker that has answered nothing for so long; its streams go on with"
            f" another; 0 and -1: never.  [default: {format_duration(config.WORKER_SILENT_MAX_S)}]",
            show_default=False,
        ),
    ] = config.WORKER_SILENT_MAX_S
    preload: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Load this model at start; repeatable.")
    ] = None
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote",
            help="Serve everyone who can reach the address, without TLS or a token.",
        ),
    ] = False
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve Prometheus metrics here, at /metrics, with the same TLS and token.",
        ),
    ] = None
    metrics_vllm_aliases: Annotated[
        bool,
        typer.Option(
            "--metrics-vllm-aliases", help="Add the vllm: names that inference routers read."
        ),
    ] = False
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the workers' sockets and the records for the next controller."
            "  [default: by the address, in $XDG_RUNTIME_DIR/mlxd or /tmp]"
        ),
    ] = None
    orphan_grace: Annotated[
        float | None,
        o.duration_option(
            "How long workers survive if this process is killed, for the next one to adopt."
            f"  [default: {format_duration(config.ORPHAN_GRACE_S)}]"
        ),
    ] = None
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            "-d",
            help="Serve in the background: wait until requests are taken, print address, process id"
            " and log, and leave.",
        ),
    ] = False
    log_file: Annotated[
        Path | None,
        typer.Option(
            help="With --detach: where the log goes.  [default: by the address, in"
            " ~/.local/state/mlxd]"
        ),
    ] = None
    log_content: Annotated[
        bool,
        typer.Option(
            "--log-content", help="Log prompts and outputs; by default they are never logged."
        ),
    ] = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: logs.LogFormat = "auto"


@spread_groups
def serve(
    context: typer.Context,
    *,
    serving: Serving,
    stores: Stores,
    prompts: KeptPrompts,
    listener: Listener,
    http: Http,
    router: Router,
    fleet: Fleet,
    attached: Attached,
) -> None:
    """Run the server until SIGTERM or Ctrl-C. Stdout says where it listens, stderr has the log."""
    channel = attached.channel
    # Before the settings are read: what is passed over in them is logged.
    logs.configure(level=serving.log_level, fmt=serving.log_format)
    configuration: Configuration = context.find_root().obj or Configuration()
    models, load_defaults = _models(serving.model or (), configuration)
    settings = ServeSettings(
        address=o.server_address(context, serving.address),
        models=models,
        load_defaults=load_defaults,
        stores=stores.places(os.environ),
        prefix_disk=prompts.disk_budget(os.environ, attached=bool(attached.worker)),
        limits=_limits(serving.memory_limit, serving.reserve, serving.gpu_overhead),
        keep_alive_s=keep_alive_s(serving.keep_alive, os.environ),
        max_loaded=serving.max_loaded,
        waiting_max=serving.waiting_max,
        load_stall_timeout_s=load_timeout_s(serving.load_timeout, os.environ),
        worker_silent_timeout_s=serving.worker_silent_timeout,
        allow_remote=serving.allow_remote,
        security=listener.files(context),
        workers=named_workers(attached.worker, channel),
        worker_security=channel,
        metrics=serving.metrics,
        metrics_vllm_aliases=serving.metrics_vllm_aliases,
        http=http.http,
        http_origins=tuple(http.http_origin or ()),
        http_agent_rules=not http.no_agent_rules,
        http_image_urls=tuple(http.image_urls or ()),
        router=router.door(),
        fleet=fleet.place(),
        preload=tuple(serving.preload or ()),
        orphan_grace_s=_orphan_grace_s(serving.orphan_grace, attached=bool(attached.worker)),
        run_dir=None if serving.run_dir is None else serving.run_dir.expanduser().absolute(),
        log_content=serving.log_content,
        log_level=serving.log_level,
        log_format=serving.log_format,
    )
    _check(settings)
    if serving.log_file is not None and not serving.detach:
        usage_error("--log-file needs --detach")
    if serving.detach and not os.environ.pop(DETACHED_VARIABLE, ""):
        announced = (LISTENING, *((config.GATEWAY_LISTENS,) if settings.http else ()))
        detach(settings.address, log=serving.log_file, announced=announced)
    # Streams cost half as much on it; a client command has no use for it.
    from uvloop import new_event_loop  # noqa: PLC0415

    allow_open_files()
    run(
        _serve(settings),
        address=settings.address,
        flags=o.given_flags(context),
        loop_factory=new_event_loop,
    )


def _limits(memory_limit: int | None, reserve: str | None, gpu_overhead: str | None) -> Limits:
    """Return what --memory-limit, --reserve and --gpu-overhead say."""
    reserve_bytes, reserve_fraction = _reserve(reserve)
    overhead_bytes, overhead_fraction = _share("--gpu-overhead", gpu_overhead or "0")
    return Limits(
        memory_limit_bytes=memory_limit,
        reserve_bytes=reserve_bytes,
        reserve_fraction=reserve_fraction,
        gpu_overhead_bytes=overhead_bytes,
        gpu_overhead_fraction=overhead_fraction,
    )


def _check(settings: ServeSettings) -> None:
    """Refuse options that do not go together."""
    if settings.metrics_vllm_aliases and settings.metrics is None:
        usage_error("--metrics-vllm-aliases needs --metrics")
    if settings.http_origins and settings.http is None:
        usage_error("--http-origin needs --http")
    if not settings.http_agent_rules and settings.http is None:
        usage_error("--no-agent-rules needs --http")
    if settings.http_image_urls and settings.http is None:
        usage_error("--image-urls needs --http")
    if settings.http is not None:
        try:
            check_usable(settings.http_origins, settings.http_image_urls)
        except InvalidRequest as error:
            usage_error(error.describe())
    if settings.fleet is not None:
        _check_fleet(settings)
    if settings.workers and settings.waiting_max is not None:
        usage_error(
            "--waiting-max applies to workers that mlxd starts; set it on those of --worker"
        )


def _check_fleet(settings: ServeSettings) -> None:
    """Refuse what is for workers of this machine, or of others."""
    others = {
        "--worker": bool(settings.workers),
        "--prefix-disk": settings.prefix_disk is not None,
        "--run-dir": settings.run_dir is not None,
    }
    for flag, is_set in others.items():
        if is_set:
            usage_error(f"{flag} does not go with --fleet")


def _orphan_grace_s(option_s: float | None, *, attached: bool) -> float:
    """Return --orphan-grace, within what a worker takes."""
    if option_s is None:
        return config.ORPHAN_GRACE_S
    if attached:
        usage_error(
            "--orphan-grace applies to workers that mlxd starts; those of --worker always stay"
        )
    if option_s > config.LOAD_TOTAL_TIMEOUT_S:
        usage_error(f"--orphan-grace: at most {format_duration(config.LOAD_TOTAL_TIMEOUT_S)}")
    return option_s


def allow_open_files() -> None:
    """Take as many open files as the system allows, within OPEN_FILES_MAX: each client has one.

    What a shell allows by itself, 1,024 or 256, is meant for programs that use `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = config.OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else hard
    wanted = min(most, config.OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _named_folder(text: str) -> tuple[str, Path]:
    """Read NAME=PATH or PATH; a name holds no separator, so that `=` may be part of a path."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name or not name:
        name, path = "", text
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        usage_error(f"--model {text}: {folder} is not a folder")
    return name or folder.name, folder


def _models(
    texts: Iterable[str], configuration: Configuration
) -> tuple[tuple[tuple[str, Path], ...], dict[str, LoadSpec]]:
    """Return the folders to offer, --model before the file, and what loads begin with."""
    named = tuple(_named_folder(text) for text in texts)
    names = {name for name, _ in named}
    try:
        folders = folders_of(configuration)
        specs = specs_of(configuration)
    except InvalidRequest as error:
        usage_error(error.describe())
    return (*named, *(pair for pair in folders if pair[0] not in names)), specs


def _reserve(text: str | None) -> tuple[int | None, float]:
    """Read --reserve as bytes or as a share of the memory."""
    if text is None:
        return None, config.MEMORY_RESERVE_FRACTION
    nbytes, share = _share("--reserve", text)
    return (None, share) if text.endswith("%") else (nbytes, config.MEMORY_RESERVE_FRACTION)


def _share(option: str, text: str) -> tuple[int, float]:
    """Read bytes or a share of the memory; what was not given of the two is 0."""
    number = text.removesuffix("%")
    try:
        if number == text:
            return parse_bytes(text), 0.0
        share = float(number) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        usage_error(f"{option} {text}: write a size such as 2G, or a share from 0% to 99%")
    return 0, share


async def _serve(settings: ServeSettings) -> None:
    # Imported here: a client command needs nothing of the controller.
    from mlxd_controller.app import serve as serve_until_stopped  # noqa: PLC0415

    # The one that this process was given: with a fleet the present one leads to stderr.
    await serve_until_stopped(settings, on_ready=partial(_announce, sys.stdout))


def _announce(stdout: TextIO, address: str, url: str | None) -> None:
    # What start-up made stays to the end: a full collection would look through all of it, and
    # every stream would wait for that, a tenth of a second.
    gc.collect()
    gc.freeze()
    typer.echo(f"{LISTENING}{address}", file=stdout)
    if url is not None:
        typer.echo(f"{config.GATEWAY_LISTENS}{url}", file=stdout)
