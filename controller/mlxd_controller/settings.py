"""The settings of one `mlxd serve`. Every default is defined here or in mlxd_shared.config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlxd_shared import config
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.findings import FINDINGS_FILE
from mlxd_shared.ops.logs import LogFormat
from mlxd_shared.security.listeners import NO_FILES, ListenerFiles
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity


@dataclass(frozen=True, slots=True)
class StorePlaces:
    """The directories of model stores; None: not used. A missing directory is an empty store."""

    models_dir: Path | None = None
    """mlxd's own directory."""
    hub_cache: Path | None = None
    """The cache of Hugging Face's libraries."""
    ollama: Path | None = None
    """Ollama's directory of manifests and blobs."""

    @property
    def findings(self) -> Path | None:
        """The file with the findings of `mlxd doctor`; None without mlxd's own directory."""
        return None if self.models_dir is None else self.models_dir / FINDINGS_FILE


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator allows of each device's memory.

    `memory_limit_bytes` caps what all its models may use. `reserve_bytes`, or else a fraction of
    the total, stays free besides what others hold; on a GPU, so do `gpu_overhead_bytes` and its
    fraction.
    """

    memory_limit_bytes: int | None = None
    reserve_bytes: int | None = None
    reserve_fraction: float = config.MEMORY_RESERVE_FRACTION
    gpu_overhead_bytes: int = 0
    gpu_overhead_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class DiskBudget:
    """A folder for parts of prompts, and the bytes that all models together may have there."""

    folder: Path
    nbytes: int
    key_file: Path | None = None
    """Has the key that they are encrypted with; None: they are in the clear."""


@dataclass(frozen=True, slots=True)
class RouterDoor:
    """Where a router in front finds models: each has a port, the first one that of `address`.

    `models` are the names to advertise; empty: all. `networks` may call, besides this machine.
    `manifest` is a file that tells a router where they are.
    """

    address: str
    models: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    manifest: Path | None = None


FLEET_SCHEME = "ray://"
"""What stands before the address of a cluster's head."""


@dataclass(frozen=True, slots=True)
class FleetPlace:
    """A cluster whose nodes run the workers: `ray://HOST:PORT`, or `auto`.

    `tls` is the folder of certificates and tokens, at the same path on all machines; None where
    all nodes are on loopback.
    """

    address: str
    tls: Path | None = None


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Options of a controller.

    `models` are (name, folder); empty means the built-in demo model under the name "demo". `stores`
    are looked into besides. `keep_alive_s` math.inf is for ever, 0 unloads when idle. `waiting_max`
    streams may wait for a row of a model; None leaves that to its worker. `load_stall_timeout_s`
    math.inf gives no load up; `worker_silent_timeout_s` math.inf or 0 ends no worker that has
    stopped answering; `orphan_grace_s` is how long ready workers outlive a controller that is
    killed. `max_loaded` None means as many as fit. `run_dir` holds the workers' sockets and
    records; None is the default of `address`. `preload` names models to load before the first
    request. `security` protects `address`, `metrics`, the HOST:PORT of the endpoint for Prometheus,
    and `http`, that of the gateway (None: there is none), which pages of `http_origins` may use and
    which follows the rules for agents with `http_agent_rules` and fetches images from the hosts of
    `http_image_urls`; `allow_remote` serves others without it. `router` is where a router in front
    finds models (None: nowhere); it sends no token. `workers` are (name, address) of workers that
    somebody else started, to be used in place of processes of our own; `fleet` is the cluster on
    which our own run, in place of this machine. `prefix_disk` is where parts of prompts outlive the
    models, and how much of them; None keeps nothing on disk. `load_defaults` are what loads begin
    with, by a model's name, alias or digest. `log_content` puts prompts and outputs into the log,
    which otherwise never has them.
    """

    address: str = config.DEFAULT_ADDRESS
    models: tuple[tuple[str, Path], ...] = ()
    stores: StorePlaces = StorePlaces()
    limits: Limits = Limits()
    keep_alive_s: float = config.KEEP_ALIVE_DEFAULT_S
    max_loaded: int | None = None
    waiting_max: int | None = None
    load_stall_timeout_s: float = config.LOAD_STALL_TIMEOUT_S
    worker_silent_timeout_s: float = config.WORKER_SILENT_MAX_S
    orphan_grace_s: float = config.ORPHAN_GRACE_S
    shutdown_grace_s: float = config.SHUTDOWN_GRACE_S
    allow_remote: bool = False
    security: ListenerFiles = NO_FILES
    workers: tuple[tuple[str, str], ...] = ()
    worker_security: ChannelSecurity = PLAIN
    fleet: FleetPlace | None = None
    metrics: str | None = None
    metrics_vllm_aliases: bool = False
    http: str | None = None
    http_origins: tuple[str, ...] = ()
    http_agent_rules: bool = True
    http_image_urls: tuple[str, ...] = ()
    router: RouterDoor | None = None
    preload: tuple[str, ...] = ()
    run_dir: Path | None = None
    prefix_disk: DiskBudget | None = None
    load_defaults: Mapping[str, LoadSpec] = field(default_factory=dict)
    log_content: bool = False
    log_level: str = "info"
    log_format: LogFormat = "auto"

    @property
    def silent_max_s(self) -> float:
        """How long a worker may go without answering; math.inf: for ever."""
        return self.worker_silent_timeout_s or math.inf
