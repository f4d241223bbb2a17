"""What a process reports of itself, as frozen values: who it is, what it serves, what it holds.

Invariants:
- Free of the wire: `wire.convert_status` reads and writes them, and nobody else does.
- A worker that says nothing of something leaves its default: 0, "", () or None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from mlxd_shared.domain.devices import JOINT
from mlxd_shared.domain.requests import KVFormat, SamplingOptions, Weights


class ModelState(StrEnum):
    """The life of a model, with its worker; UNKNOWN for what a later version may say."""

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

    stage: str = ""
    bytes_read: int = 0
    bytes_total: int = 0

    @property
    def fraction(self) -> float:
        """Between 0 and 1; 0 while the total is unknown."""
        return self.bytes_read / self.bytes_total if self.bytes_total else 0.0


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """One account of a worker's ledger."""

    name: str
    nbytes: int
    arrays: int = 0


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one of the processes holds that share a model."""

    device: str = ""
    pid: int = 0
    mlx_active_nbytes: int = 0
    mlx_cache_nbytes: int = 0
    mlx_peak_nbytes: int = 0
    resident_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """What a worker holds: by its own accounts, by MLX, and by the system.

    `devices` maps a device, as its controller names it, to the bytes on it.
    """

    accounts: tuple[MemoryAccount, ...] = ()
    total_nbytes: int = 0
    """The sum of the accounts."""
    mlx_active_nbytes: int = 0
    mlx_cache_nbytes: int = 0
    mlx_peak_nbytes: int = 0
    unaccounted_nbytes: int = 0
    """What MLX has in use beyond the accounts; below 0 where it has less."""
    devices: Mapping[str, int] = field(default_factory=dict)
    resident_nbytes: int = 0
    ranks: tuple[RankMemory, ...] = ()
    """Where several processes share the model: each of them."""

    @property
    def mlx_nbytes(self) -> int:
        """What MLX holds, its pool included."""
        return self.mlx_active_nbytes + self.mlx_cache_nbytes


@dataclass(frozen=True, slots=True)
class MathLibrary:
    """The library that multiplies matrices, and why that one."""

    name: str = ""
    version: str = ""
    threads: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PrefixDisk:
    """What a worker keeps of prompts on disk, and has done with it since it loaded its model."""

    form: str = ""
    """The name of its folder."""
    nbytes: int = 0
    budget_nbytes: int = 0
    """What it may keep; a full disk lowers it."""
    blocks: int = 0
    """Files."""
    block_nbytes: int = 0
    """The most that one block takes."""
    least_worth: float = 0.0
    """Seconds that a byte of what would go first saves in a second: comparable between models."""
    written: int = 0
    written_nbytes: int = 0
    read: int = 0
    read_nbytes: int = 0
    evicted: int = 0
    refused: int = 0
    """Files that were removed because they were no blocks."""
    hit_tokens: int = 0
    """Tokens of prompts that were read and not computed."""
    encrypted: bool = False
    """Whether it is written encrypted."""


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker. What only its parent knows, as of its end, is as of a process that lives."""

    pid: int = 0
    address: str = ""
    incarnation: str = ""
    started_unix_s: float = 0.0
    model_name: str = ""
    model_path: str = ""
    model_digest: str = ""
    state: ModelState = ModelState.UNKNOWN
    progress: LoadProgress | None = None
    last_error: str = ""

    backend: str = ""
    mlx_version: str = ""
    math_library: MathLibrary | None = None
    compiles: bool = False
    fast_paths_off: tuple[str, ...] = ()
    """Ways to compute faster that are switched off on this device, each with the reason."""

    context_length: int = 0
    context_length_max: int = 0
    vocab_size: int = 0
    rows_max: int = 0
    weights: Weights = Weights.AUTO
    """AUTO: nothing is said of them, as while nothing is loaded."""
    kv_format: KVFormat | None = None
    form_is_known: bool = True
    """False where `weights` or `kv_format` is one of a later version, and so is not here."""
    prefix_cache_nbytes: int = 0
    prefix_disk: PrefixDisk | None = None
    """None: it keeps nothing there."""
    prefix_reload_s: float = 0.0
    """What the next request would have to compute, or read, of what memory has, had the model been
    unloaded meanwhile; in seconds."""
    sampling: SamplingOptions | None = None
    """The values in force where a request leaves them absent."""

    memory: WorkerMemory = WorkerMemory()
    age_s: float | None = None
    """How old the figures of memory and streams were when they were told; None: there were none."""
    streams_running: int = 0
    streams_waiting: int = 0
    oldest_wait_s: float | None = None
    kv_tokens_used: int = 0
    kv_tokens_capacity: int = 0
    cpu_s: float = 0.0

    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """The device, or group, on which the model lives, as the worker reports; "": none."""
        if self.memory.ranks:
            return JOINT.join(rank.device for rank in self.memory.ranks)
        return next(iter(self.memory.devices), "")

    @property
    def kv_use_ratio(self) -> float:
        """The part of the rows' tokens that is in use, 0 to 1."""
        return self.kv_tokens_used / self.kv_tokens_capacity if self.kv_tokens_capacity else 0.0


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of one machine; `resident_nbytes` is the part of mlxd.

    `machine` is its name for people. `machine_id` is the same for all processes that share this
    memory, and for no others; "" where a process of an earlier version does not say. The figures of
    one that is `lost` are its last.
    """

    machine: str = ""
    machine_id: str = ""
    total_nbytes: int = 0
    available_nbytes: int = 0
    resident_nbytes: int = 0
    lost: bool = False


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """What a process says: a worker of itself, a controller of all its workers."""

    version: str = ""
    host: HostMemory = HostMemory()
    workers: tuple[WorkerFigures, ...] = ()
