"""What the engine thread passes to the event loop: frozen values, no arrays. Imports no MLX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mlxd_shared.blocks.sealing import DiskKey
from mlxd_shared.domain.figures import LoadProgress, MemoryAccount, PrefixDisk, RankMemory
from mlxd_shared.domain.requests import KVFormat, LoadSpec, SamplingOptions, Weights
from mlxd_worker.chat.format import ChatFormat
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.engine.request import Occupancy
from mlxd_worker.text.pooling_files import EmbedDefaults
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.vision.sight import Sight


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One model to load: its folder, its name, and the options of the load."""

    path: Path
    name: str
    digest: str
    spec: LoadSpec


@dataclass(frozen=True, slots=True)
class DiskFolder:
    """Where a worker keeps blocks of prompts that outlive it."""

    path: Path
    budget_nbytes: int | None
    """Of one model in one form; None: what is there stays, and nothing comes, until a controller
    gives it a share."""
    key: DiskKey | None = None
    """What blocks are encrypted with; None: nothing is encrypted."""


Report = Callable[[LoadProgress], None]
"""Takes the progress of a load; called on the engine thread, must return at once."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready, and the options in use."""

    job: LoadJob
    tokenizer: Tokenizer
    constraints: Constraints
    """Compiles response formats for it."""
    chat: ChatFormat | None
    """Renders and parses conversations; None if the model has no template."""
    vocab_size: int
    context_length: int
    context_length_max: int
    rows_max: int
    weights: Weights
    kv_format: KVFormat
    prefix_cache_nbytes: int
    """The budget for snapshots of former prompts; 0 keeps none."""
    sampling: SamplingOptions
    """The values used if a request leaves them absent; only the seed may be None."""
    embedding: EmbedDefaults
    """Likewise, for vectors of texts."""
    embeds: bool = True
    """Whether it makes vectors of texts."""
    sight: Sight | None = None
    """How it sees images; None: it reads text alone."""
    unseeing: str = ""
    """Why, where it has a tower; empty: it sees, or has none."""


@dataclass(frozen=True, slots=True)
class PrefixFigures:
    """The counters of one model's prefix cache since the process began."""

    lookups: tuple[tuple[str, str, int], ...] = ()
    """Result ("hit" or "miss"), reason, and how often."""
    hit_tokens: int = 0
    disk_tokens: int = 0
    """The part of them that was read from disk."""
    evictions: int = 0
    evicted_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """The counters of one model's guesses since the process began."""

    drafted_tokens: int = 0
    """Guesses that the model has judged."""
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """The engine's figures at one moment (`at_s`, on the monotonic clock)."""

    at_s: float
    load: Occupancy = field(default_factory=Occupancy)
    accounts: tuple[MemoryAccount, ...] = ()
    mlx_active_nbytes: int = 0
    mlx_cache_nbytes: int = 0
    mlx_peak_nbytes: int = 0
    prefix_snapshots: int = 0
    """Open snapshots, those of running rows included."""
    prefixes: tuple[tuple[str, PrefixFigures], ...] = ()
    """By model; all models that this process has had."""
    speculations: tuple[tuple[str, SpeculationFigures], ...] = ()
    """Likewise."""
    prefix_disk: PrefixDisk | None = None
    """What the resident model keeps on disk; None: nothing is kept there."""
    prefix_reload_s: float = 0.0
    """See `WorkerFigures`."""
    can_guess: bool = False
    """Whether the resident model's caches can take wrong guesses back."""
    unaccounted_nbytes: int = 0
    """MLX's active bytes less the accounts, when the engine was last idle."""
    ranks: tuple[RankMemory, ...] = ()
    """What each process holds that shares the model; their devices have no names here."""
