"""The worker's command line, parsed into one frozen value. Imports neither MLX nor the wire."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import KVFormat, LoadSpec, Weights, load_violations
from mlxd_shared.domain.units import format_bytes, parse_bytes
from mlxd_shared.ops.logs import LEVELS, LogFormat
from mlxd_shared.security.listeners import ListenerFiles
from mlxd_worker.thread.facts import DiskFolder

HELD = "held"
"""A size: what is on disk stays, and nothing comes, until a controller gives a share."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line, by the parser's names for them; None where not given."""

    listen: str | None
    allow_remote: bool
    security: ListenerFiles
    incarnation: str
    device: str
    machine: str
    ready_fd: int | None
    life_fd: int | None
    orphan_grace_s: float
    stop_grace_s: float
    model: Path | None
    name: str
    spec: LoadSpec
    threads: int | None
    ranks: int
    findings: Path | None
    waiting_max: int
    replay_steps: int
    prefix_disk: DiskFolder | None
    """Without the key, which is in a file."""
    prefix_disk_key: Path | None
    log_level: str
    log_format: LogFormat


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Return the options; exits with `ExitCode.BAD_OPTIONS` where they make no sense.

    Raises:
        InvalidRequest: a load option is out of range.
    """
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    take = options.pop
    disk, disk_size = take("prefix_disk"), take("prefix_disk_size")
    for option, value in (("size", disk_size), ("key", options["prefix_disk_key"])):
        if disk is None and value is not None:
            parser.error(f"argument --prefix-disk-{option}: needs --prefix-disk")
    if options["ranks"] > 1 and disk is not None:
        parser.error("argument --prefix-disk: not with --ranks: each rank has its own part")
    if options["ranks"] > 1 and options["findings"] is not None:
        parser.error("argument --findings: not with --ranks: all of them take the same paths")
    kv_format = take("kv_format")
    spec = LoadSpec(
        context_length=take("context_length"),
        rows_max=take("rows_max"),
        weights=Weights(take("weights")),
        kv_format=KVFormat(kv_format) if kv_format else None,
        prefix_cache_nbytes=take("prefix_cache"),
    )
    violations = load_violations(spec, prefix="options")
    if violations:
        raise InvalidRequest(tuple(violations))
    files = ("tls_cert", "tls_key", "tls_client_ca", "token_file", "open_health")
    security = ListenerFiles(*map(take, files))
    model: Path | None = options["model"]
    options["name"] = options["name"] or (model.resolve().name if model else "")
    options["incarnation"] = options["incarnation"] or uuid.uuid4().hex
    folder = _disk_folder(disk, disk_size)
    return Options(security=security, spec=spec, prefix_disk=folder, **options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlxd-worker", description="Serve one MLX model over gRPC; started by mlxd, or alone."
    )
    add = parser.add_argument
    add("--listen", help="unix:PATH or tcp:HOST:PORT (port 0: any); default: a private socket")
    add("--allow-remote", action="store_true", help="listen where other machines can connect")
    files = (
        ("--tls-cert", "serve TLS: the certificates as PEM"),
        ("--tls-key", "the key of --tls-cert"),
        ("--tls-client-ca", "serve only clients with a certificate that these signed"),
        ("--token-file", "serve only clients that send the token in this file"),
    )
    for name, text in files:
        add(name, type=Path, metavar="FILE", help=text)
    add("--open-health", action="store_true", help="answer health checks without the token")
    add("--incarnation", default="", help="this process's name; default: a random one")
    add("--device", default="", metavar="NAME", help="what to call the device in its status")
    machine_text = "what to call its machine; workers of one name share a memory; default: the host"
    add("--machine", type=_machine_name, default="", metavar="NAME", help=machine_text)
    add("--ready-fd", type=int, help="write one JSON line with the address here, when listening")
    add("--life-fd", type=int, help="read end of a pipe; its end means that the controller is gone")
    graces = (
        ("orphan", config.ORPHAN_GRACE_S, "how long to serve without a controller"),
        ("stop", config.WORKER_STOP_GRACE_S, "how long streams may take to stop"),
    )
    for name, default, text in graces:
        option, dest = f"--{name}-grace", f"{name}_grace_s"
        add(option, dest=dest, type=_seconds, default=default, metavar="SECONDS", help=text)
    add("--model", type=Path, metavar="FOLDER", help="load this model at once")
    add("--name", default="", help="the name to serve it under; default: the folder's")
    add("--context-length", type=_count, metavar="TOKENS")
    add("--rows-max", type=_count, metavar="N", help="streams decoded side by side")
    add("--weights", choices=[w.value for w in Weights], default=Weights.AUTO.value)
    add(
        "--kv-format",
        choices=[f.value for f in KVFormat],
        help="of keys and values; default: model",
    )
    prefix_text = f"of snapshots of former prompts; default: {config.PREFIX_MEMORY_FRACTION:.0%}%"
    add("--prefix-cache", type=_size, metavar="SIZE", help=f"{prefix_text} of memory; 0: none")
    _add_prefix_disk(add)
    waiting_text = f"streams that may wait; default: {config.WAITING_STREAMS_MAX}"
    add(
        "--waiting-max",
        type=_between(0, config.WAITING_STREAMS_LIMIT),
        default=config.WAITING_STREAMS_MAX,
        metavar="N",
        help=waiting_text,
    )
    add(
        "--replay-steps",
        type=_between(0, config.CONTEXT_LENGTH_LIMIT),
        default=0,
        metavar="TOKENS",
        help="resume streams of up to this many tokens by decoding them again; default: 0, none",
    )
    ranks_text = "processes that share the model, a device each; default: 1"
    add("--ranks", type=_between(1, config.RANKS_MAX), default=1, metavar="N", help=ranks_text)
    add("--threads", type=_count, metavar="N", help="threads of the math library")
    findings_text = "doctor.json: leave out the fast paths that fail or are slower here by it"
    add("--findings", type=Path, metavar="FILE", help=findings_text)
    add("--log-level", choices=list(LEVELS), default="info")
    add("--log-format", choices=["auto", "json", "console"], default="auto")
    return parser


def _add_prefix_disk(add: Callable[..., object]) -> None:
    """Add the options that say where parts of prompts outlive a model."""
    disk_size_text = f"default: {format_bytes(config.PREFIX_DISK_BYTES_DEFAULT)}; 0: none"
    add(
        "--prefix-disk",
        type=Path,
        metavar="FOLDER",
        help="keep parts of prompts here when the model goes; for this user alone (0700)",
    )
    add(
        "--prefix-disk-size",
        type=_size_or_held,
        metavar="SIZE",
        help=f"of these; {disk_size_text}; {HELD}: what is there, until a controller gives a share",
    )
    add(
        "--prefix-disk-key",
        type=Path,
        metavar="FILE",
        help="encrypt these with the key in this file, which only its user may read (0600)",
    )


def _disk_folder(path: Path | None, nbytes: int | str | None) -> DiskFolder | None:
    if path is None:
        return None
    if isinstance(nbytes, str):
        return DiskFolder(path, None)
    return DiskFolder(path, config.PREFIX_DISK_BYTES_DEFAULT if nbytes is None else nbytes)


def _machine_name(text: str) -> str:
    if len(text) > config.MACHINE_NAME_CHARS_MAX or not text.isprintable():
        limit = f"{config.MACHINE_NAME_CHARS_MAX} printable characters"
        raise argparse.ArgumentTypeError(f"{text[:20]!r}... is not a name of at most {limit}")
    return text


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= config.LOAD_TOTAL_TIMEOUT_S:
        message = f"{text} is outside 0 to {config.LOAD_TOTAL_TIMEOUT_S} seconds"
        raise argparse.ArgumentTypeError(message)
    return value


def _size(text: str) -> int:
    try:
        nbytes = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if nbytes > config.PREFIX_CACHE_BYTES_LIMIT:
        message = f"{text} is above {format_bytes(config.PREFIX_CACHE_BYTES_LIMIT)}"
        raise argparse.ArgumentTypeError(message)
    return nbytes


def _size_or_held(text: str) -> int | str:
    return HELD if text == HELD else _size(text)


def _between(least: int, most: int) -> Callable[[str], int]:
    """Return what reads a whole number from `least` to `most`."""

    def whole(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            message = f"{text} is outside {least} to {most}"
            raise argparse.ArgumentTypeError(message)
        return value

    return whole


_count = _between(1, (1 << 31) - 1)
