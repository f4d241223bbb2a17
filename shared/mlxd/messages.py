"""What the client returns: frozen values, no protobuf, times in seconds and UTC.

The .proto files define the fields. A value that the server left out is None.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping
from dataclasses import dataclass

from mlxd_shared.domain.figures import (
    HostMemory,
    LoadProgress,
    MathLibrary,
    ModelState,
    PrefixDisk,
    WorkerMemory,
)
from mlxd_shared.domain.requests import KVFormat, SamplingOptions, Score, Weights


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of texts, in their order, and the token count of all texts."""

    vectors: tuple[tuple[float, ...], ...]
    prompt_tokens: int
    model_digest: str


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of continuations, text by text, and the count of all evaluated tokens."""

    scores: tuple[tuple[Score, ...], ...]
    prompt_tokens: int
    model_digest: str


@dataclass(frozen=True, slots=True)
class Model:
    """A model, as the controller knows it. `expire_time` None means that it never expires.

    `kv_format` is None while it is not loaded.
    """

    name: str
    aliases: tuple[str, ...]
    digest: str
    path: str
    architecture: str
    state: ModelState
    progress: LoadProgress
    error: str
    context_length_max: int
    context_length: int
    vocab_size: int
    stored_nbytes: int
    resident_nbytes: int
    device: str
    weights: Weights
    rows_max: int
    effective_sampling: SamplingOptions
    streams_active: int
    pinned: bool
    priority: int
    last_used_time: dt.datetime | None
    expire_time: dt.datetime | None
    worker_incarnation: str
    kv_format: KVFormat | None
    prefix_cache_nbytes: int
    store: str
    has_pooling: bool = False
    """Whether its files define how texts become vectors: it was made for embeddings."""
    has_chat_template: bool = False
    prefix_reload_s: float = 0.0
    """What the next request would compute or read again of prompts, had it been unloaded."""
    has_vision: bool = False
    """Whether it sees the images of a chat's messages."""
    ranks: int = 0
    """How many processes share it, a device each; 0 while it is not loaded."""
    machine: str = ""
    """Of a fleet, the machine that has `path`, where it is not the server's own."""


@dataclass(frozen=True, slots=True)
class FitTerm:
    """One named term of a fit."""

    name: str
    nbytes: int
    note: str


@dataclass(frozen=True, slots=True)
class Absence:
    """What a model that is evicted costs whoever asks for it next: its load, and its prompts."""

    model: str
    reload_s: float
    prompts_s: float


@dataclass(frozen=True, slots=True)
class FitReport:
    """Whether a model fits, and why."""

    model: str
    model_digest: str
    fits_now: bool
    fits_ever: bool
    terms: tuple[FitTerm, ...]
    need_nbytes: int
    budget_nbytes: int
    available_nbytes: int
    reserve_nbytes: int
    device: str
    weights: Weights
    context_length: int
    rows_max: int
    would_evict: tuple[str, ...]
    suggestions: tuple[str, ...]
    kv_format: KVFormat | None
    prefix_cache_nbytes: int
    absences: tuple[Absence, ...] = ()
    ranks: int = 0
    """How many processes share it; what is said of bytes is one process's."""


@dataclass(frozen=True, slots=True)
class LoadUpdate:
    """One step of a load; `fit` is set once, when the load begins."""

    model: Model
    fit: FitReport | None


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The answer to an unload."""

    model: Model
    streams_aborted: int


@dataclass(frozen=True, slots=True)
class LogLines:
    """Lines that a worker has written; `missed_lines` before them were dropped unread."""

    lines: tuple[str, ...]
    missed_lines: int
    worker_incarnation: str
    pid: int


class ProcessRole(enum.Enum):
    """The kind of process that answered."""

    UNKNOWN = "unknown"
    CONTROLLER = "controller"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device's memory: mlxd's budget, what is reserved for models, and what they hold.

    `usable_nbytes` is the part of the budget that other programs leave now. No load begins there
    while it is `pressed`, or its `machine` is `lost`; the figures are then the last ones. `id` is
    the driver's id of a GPU. `models_max` limits the number of models; None: as many as fit.
    """

    name: str
    kind: str
    total_nbytes: int
    budget_nbytes: int
    reserved_nbytes: int
    usable_nbytes: int
    held_nbytes: int
    pressed: bool
    id: str
    product: str
    machine: str
    lost: bool
    models_max: int | None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker. `exit_code` is set once it has ended; negative: the signal that ended it."""

    pid: int
    address: str
    incarnation: str
    model_name: str
    model_path: str
    model_digest: str
    state: ModelState
    progress: LoadProgress
    context_length: int
    context_length_max: int
    vocab_size: int
    rows_max: int
    memory: WorkerMemory
    figures_age_s: float
    exit_code: int | None
    last_error: str
    last_lines: tuple[str, ...]
    streams_running: int
    streams_waiting: int
    oldest_wait_s: float
    kv_tokens_used: int
    kv_tokens_capacity: int
    backend: str
    mlx_version: str
    math_library: MathLibrary
    compiles: bool
    weights: Weights
    cpu_s: float
    start_time: dt.datetime | None
    effective_sampling: SamplingOptions
    kv_format: KVFormat | None
    prefix_cache_nbytes: int
    fast_paths_off: tuple[str, ...]
    prefix_disk: PrefixDisk | None = None
    prefix_reload_s: float = 0.0


class MetricKind(enum.Enum):
    """What a metric's values mean."""

    UNKNOWN = "unknown"
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts below each bound and above the one before; the last count is above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """One value of a family, or one histogram."""

    labels: Mapping[str, str]
    value: float
    histogram: Histogram | None


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric with all its labels."""

    name: str
    help: str
    kind: MetricKind
    points: tuple[MetricPoint, ...]


@dataclass(frozen=True, slots=True)
class PrefixFolder:
    """What is on disk of one model's prompts, as it was loaded in one form.

    `last_use_time` is None for those of workers; `in_use`: a process has it. `encrypted`: all of
    its files are, or, of a worker's, all that it writes.
    """

    form: str
    model: str
    model_digest: str
    weights: str
    context_length: int
    nbytes: int
    blocks: int
    last_use_time: dt.datetime | None
    in_use: bool
    encrypted: bool


@dataclass(frozen=True, slots=True)
class PrefixStore:
    """What is on disk of prompts, of all models together; the largest 256 folders of it."""

    path: str
    budget_nbytes: int
    nbytes: int
    folders: tuple[PrefixFolder, ...]


@dataclass(frozen=True, slots=True)
class DroppedPrefixes:
    """What was removed of prompts on disk: files, and their bytes."""

    blocks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class VerifiedPrefixes:
    """What a check of one folder found: files that are sound, damaged and removed, or unreadable.

    `form` is the folder's name. `locked` are encrypted with a key that was not at hand, and stay.
    """

    form: str
    model: str
    sound: int
    removed: int
    unread: int
    locked: int


@dataclass(frozen=True, slots=True)
class Status:
    """What a process does and holds. Counters start at `start_time`."""

    role: ProcessRole
    version: str
    pid: int
    start_time: dt.datetime | None
    now: dt.datetime | None
    host_memory: HostMemory
    devices: tuple[DeviceStatus, ...]
    workers: tuple[WorkerStatus, ...]
    metrics: tuple[MetricFamily, ...]
    machines: tuple[HostMemory, ...]
    prefix_store: PrefixStore | None = None
