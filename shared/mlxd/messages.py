"""What the client gives back: frozen values, no protobuf, times in seconds and UTC.

The fields mean what the .proto files say. A value that the server left out is None.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_shared.domain.chats import AnswerPart, ChatMessage, answer_of
from mlxd_shared.domain.figures import HostMemory, MathLibrary, MemoryAccount
from mlxd_shared.domain.requests import FinishReason, KVFormat, SamplingOptions, Weights


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability under the raw logits, and its own bytes, maybe no whole text."""

    token_id: int
    logprob: float
    text_bytes: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The log-probabilities at one position: the drawn token's, and the best ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of a stream. `offset` is the index of the first of `token_ids`.

    `logprobs` has one entry for each of `token_ids` where they were asked for, else none.
    """

    offset: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    parts: tuple[AnswerPart, ...] = ()
    """The pieces of a chat's answer; `text` is that of its text alone."""
    seed: int | None = None
    """On the first of a stream: its seed, with which it can be resumed should it break off."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that one stream took: one, but where its client went on after a loss."""

    lost: int = 0
    """Those that broke off after something had come."""
    resumed_tokens: int = 0
    """What the client had before the last one began."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request cost.

    Where it took several calls, durations and counts of events are those of the last one; tokens
    are all of the stream's.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int
    queue_s: float
    load_s: float
    prompt_s: float
    completion_s: float
    seed: int
    migrations: int
    near_ties: int
    cache_reason: CacheReason | None = None
    """Why no more than `cached_tokens` was reused."""
    drafted_tokens: int = 0
    """Guesses that the model has judged."""
    accepted_draft_tokens: int = 0
    """Those that were right, and so are part of the output."""
    calls: Calls = field(default_factory=Calls)
    """The calls that it took."""

    @property
    def first_token_s(self) -> float:
        """From the request's arrival to its first token."""
        return self.queue_s + self.load_s + self.prompt_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first, by the second; None for fewer than two tokens.

        Of a stream that was resumed, those of the last call. None where it moved to another worker:
        nobody knows how many of its tokens that one made.
        """
        tokens = self.completion_tokens - self.calls.resumed_tokens
        if tokens < 2 or self.completion_s <= 0 or self.migrations:
            return None
        return (tokens - 1) / self.completion_s


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a stream, always its last message.

    `matched` is the stop string, or the id of the end-of-sequence or stop token.
    """

    reason: FinishReason
    matched: str | int | None
    usage: Usage
    request_id: str
    model_digest: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole stream at once."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    logprobs: tuple[PositionLogprobs, ...] = ()
    message: ChatMessage | None = None
    """The message that a chat's answer adds to it; None if the output was not parsed."""

    @classmethod
    def of(cls, events: Iterable[Delta | Finished]) -> Completion:
        """Return what a whole stream's events come to; the last of them is Finished."""
        *begun, finished = events
        assert isinstance(finished, Finished), "a stream that is not whole"
        deltas = [event for event in begun if isinstance(event, Delta)]
        text = "".join(delta.text for delta in deltas)
        token_ids = tuple(token for delta in deltas for token in delta.token_ids)
        positions = tuple(each for delta in deltas for each in delta.logprobs)
        parts = [part for delta in deltas for part in delta.parts]
        return cls(text, token_ids, finished, positions, answer_of(parts) if parts else None)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of texts, in their order, and the tokens of all texts together."""

    vectors: tuple[tuple[float, ...], ...]
    prompt_tokens: int
    model_digest: str


class ModelState(enum.Enum):
    """The life of a model in the controller."""

    UNKNOWN = "unknown"
    UNLOADED = "unloaded"
    QUEUED = "queued"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    UNLOADING = "unloading"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load has come."""

    bytes_read: int
    bytes_total: int
    stage: str


@dataclass(frozen=True, slots=True)
class Model:
    """A model, as the controller knows it. `expire_time` None means for as long as it runs.

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


@dataclass(frozen=True, slots=True)
class FitTerm:
    """One named term of a fit."""

    name: str
    nbytes: int
    note: str


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


@dataclass(frozen=True, slots=True)
class LoadUpdate:
    """One step of a load; `fit` comes once, when the load begins."""

    model: Model
    fit: FitReport | None


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The answer to an unload."""

    model: Model
    streams_aborted: int


class ProcessRole(enum.Enum):
    """Who answered."""

    UNKNOWN = "unknown"
    CONTROLLER = "controller"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device's memory: what mlxd may use of it, what models are promised, what they hold.

    `usable_nbytes` is what of the budget other programs leave now. While `pressed` no load begins
    there; nor where its `machine` is `lost`, of which these are the last figures. `id` is the
    driver's own of a GPU. `models_max` can live there, whatever they take; None: as many as fit.
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
class WorkerMemory:
    """The exact account of a worker's memory. `devices` maps a device to the bytes on it."""

    accounts: tuple[MemoryAccount, ...]
    total_nbytes: int
    mlx_active_nbytes: int
    mlx_cache_nbytes: int
    mlx_peak_nbytes: int
    unaccounted_nbytes: int
    devices: Mapping[str, int]
    resident_nbytes: int


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
class Status:
    """What a process is doing and what it holds. Counters begin at `start_time`."""

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
