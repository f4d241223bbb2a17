"""The controller's seams: each outside world as one Protocol, with a fake in tests/fakes.

Everything here is used on the event loop's thread. A method that waits is a coroutine; any other
method never blocks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from mlxd_controller.core.state import NOTHING_FIXED
from mlxd_controller.runtime.kept_lines import KeptLines
from mlxd_models.fit.facts import ModelFacts
from mlxd_models.fit.plan import Device
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.figures import HostMemory, LoadProgress, ProcessStatus, WorkerFigures
from mlxd_shared.domain.requests import LoadSpec, SamplingOptions
from mlxd_shared.ops.known_process import ProcessMark
from mlxd_shared.wire.proof import Checked, Proof


class Clock(Protocol):
    """Time. `now_s` never goes back; `unix_s` is for people."""

    def now_s(self) -> float:
        """Return monotonic seconds."""

    def unix_s(self) -> float:
        """Return seconds since the epoch."""


class SystemClock:
    """The real clock."""

    def now_s(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def unix_s(self) -> float:
        """Return seconds since the epoch."""
        return time.time()


class StoreKind(StrEnum):
    """Where a model is kept."""

    FOLDER = "folder"
    """A folder named to the server."""
    MODELS = "models"
    """mlxd's own directory of models."""
    HUB = "hub"
    """The cache of Hugging Face's libraries."""
    OLLAMA = "ollama"
    """Ollama's manifests and blobs."""


@dataclass(frozen=True, slots=True)
class HubOrigin:
    """Which files of a hub a model is: a repository, a commit of it, and what each file is there.

    `contents` are (name, hash): SHA-256 of large files, git's SHA-1 of small ones. Files whose hash
    the cache does not tell are not among them.
    """

    repository: str
    commit: str
    contents: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model that can be served: its identity, its names, and what its files state."""

    digest: str
    name: str
    aliases: tuple[str, ...]
    path: Path
    facts: ModelFacts
    defaults: SamplingOptions
    """What the model's files set for sampling."""
    store: StoreKind = StoreKind.FOLDER
    has_pooling: bool = False
    """Whether its files say how to pool its texts into vectors."""
    has_chat_template: bool = False
    configured: LoadSpec = NOTHING_FIXED
    """What the operator's configuration fixes for loads of it."""
    origin: HubOrigin | None = None
    """Where a hub has it; None where that is not known."""
    machine: str = ""
    """Of a fleet's, on whose disk `path` is; "": this one's."""


@dataclass(frozen=True, slots=True)
class BrokenRef:
    """A name whose files cannot be served."""

    name: str
    path: Path
    error: MlxdError
    store: StoreKind = StoreKind.FOLDER


class ModelStore(Protocol):
    """Resolves names to models. Files are read off the event loop."""

    async def resolve(self, name: str) -> ModelRef:
        """Return the model for a name, alias or digest, as its files are now.

        Raises:
            ModelNotFound: no such name.
            InvalidModel: its files cannot be served.
        """

    def only_name(self) -> str:
        """Return the name to use if a request names no model.

        Raises:
            InvalidRequest: there is not exactly one model.
        """

    async def inspect(self, path: Path, *, name: str) -> ModelRef:
        """Return what `add` would for a folder, without adding it."""

    async def add(
        self, path: Path, *, name: str, in_use: Callable[[], Collection[str]] = tuple
    ) -> ModelRef:
        """Add a folder under `name` (empty: the folder's own) and return its model.

        Another name may be forgotten to make room, but no alias, and no name of a model whose
        digest or path `in_use` returns at that moment.

        Raises:
            ModelNotFound: no such folder.
            InvalidModel: its files cannot be served.
            InvalidRequest: the name belongs to another folder, or is not a valid name; or the
                folder has the maximum number of names.
            QueueFull: the maximum number of names is reached, and all are in use.
        """

    def use(self, name: str) -> None:
        """Note a use of a name: names are forgotten by their last use."""

    async def forget(
        self, name: str, *, in_use: Callable[[], Collection[str]] = tuple
    ) -> tuple[str, ...]:
        """Forget a name that `add` gave, and return the folder's other names.

        Raises:
            ModelNotFound: no such name.
            InvalidRequest: the name comes from elsewhere (configuration, an alias, a store), or is
                the last one of a model that `in_use` returns.
        """

    def telling(self, listener: Callable[[str], None]) -> AbstractContextManager[None]:
        """Report each forgotten name to `listener` at once while the body runs."""

    async def list_models(self) -> tuple[ModelRef | BrokenRef, ...]:
        """Return every model once, sorted by name."""

    def find_known(self, digest: str) -> ModelRef | None:
        """Return the model with this digest, as it was last read."""


class DeviceProbe(Protocol):
    """Measures the devices' memory."""

    def read(self, own_pids: Iterable[int]) -> tuple[Device, ...]:
        """Return the devices as they are now; memory held by `own_pids` counts as usable.

        At least one, in a fixed order. A device whose machine cannot be reached stays in the list,
        `lost` and with its last figures; by then all workers there have ended, and none starts
        there any more. Memory held by a worker unknown to the scheduler, as on a machine that has
        come back, counts as used by others.
        """

    def machines(self) -> tuple[HostMemory, ...]:
        """Return the memory of the workers' machines, lost ones too; () means this machine."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A model that a worker holds ready, as a later controller must know it.

    `spec` is what operators and requests fixed; `load_s` is how long the load took.
    """

    digest: str
    name: str
    path: str
    spec: LoadSpec
    load_s: float


END_WITH_MACHINE = 254
"""The exit code of a worker whose machine was lost, and nothing else is known of it."""


class WorkerProcess(Protocol):
    """One worker process, from the moment it listens. Every waiter sees its end."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def address(self) -> str:
        """The address for gRPC."""

    @property
    def incarnation(self) -> str:
        """Its identity, unique among all processes."""

    @property
    def proof(self) -> Proof | None:
        """The proof by which it accepts a request as checked; None if it gave none."""

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative: the signal that ended it; see END_WITH_MACHINE."""

    @property
    def output(self) -> KeptLines:
        """The output that is kept; closed once the process has ended."""

    def last_lines(self) -> tuple[str, ...]:
        """Return its last lines of output, oldest first."""

    def remember(self, holding: Holding | None) -> None:
        """Record what it holds for a later controller; None: there is nothing to adopt.

        Does nothing for a worker that others look after.
        """

    async def wait_exited(self) -> int:
        """Return the exit code once the process is reaped and its output is read."""

    async def close(self) -> int:
        """End it: interrupt, a grace, kill, reap. Idempotent; concurrent calls get one answer."""


class Launcher(Protocol):
    """Starts worker processes."""

    async def launch(self, *, model: str, incarnation: str, device: str = "") -> WorkerProcess:
        """Start a worker, or take a running one, and return it once it listens.

        `model` is the name of what it will load, `device` the one to use, as the probe names it;
        "" leaves the choice to the worker. Of a group, whose devices' names are joined, each is for
        one of the worker's ranks. A running worker has its own incarnation.

        On cancellation the process is ended and reaped before CancelledError propagates.

        Raises:
            WorkerExited: it ended before it listened (code, last lines).
            WorkerTimedOut: it neither listened nor ended in time (last lines); it has been ended.
            BackendProblem, WorkerStartFailed: it reported why it cannot serve.
        """


class RawStream(Protocol):
    """A Generate on a worker, as serialised messages."""

    async def read(self) -> bytes | None:
        """Return the next message, None at the end.

        Raises:
            MlxdError: the worker's own error, with its details; or RemoteError.
        """

    def cancel(self) -> None:
        """Stop the worker's stream; idempotent."""


class Question(StrEnum):
    """What a worker answers with one message, named by its method of InferenceService."""

    TOKENIZE = "Tokenize"
    DETOKENIZE = "Detokenize"
    EMBED = "Embed"
    SCORE = "Score"


class WorkerLink(Protocol):
    """Everything the controller asks of one worker; adds model and incarnation by itself.

    Requests of clients pass through as bytes: only the services parse and check them, and the
    worker is told that they are checked if it has given this controller a proof.
    Every method raises the worker's own MlxdError, or RemoteError where gRPC itself failed.
    """

    def load(self, name: str, path: str, spec: LoadSpec) -> AsyncGenerator[LoadProgress, None]:
        """Load and yield the progress; complete when the stream ends without an error."""

    def generate(self, request: Checked, *, timeout_s: float | None) -> RawStream:
        """Start a Generate with a serialised request, whose model and incarnation are ignored."""

    async def ask(self, question: Question, request: Checked, *, timeout_s: float | None) -> bytes:
        """Return the worker's answer; serialised messages in and out, as with `generate`."""

    async def status(self, *, timeout_s: float) -> ProcessStatus:
        """Return what the worker reports of itself."""

    def watch(self, *, interval_s: float) -> AsyncGenerator[ProcessStatus, None]:
        """Yield what the worker reports of itself, now and at every interval, until it stops."""

    async def shrink(self, target_bytes: int, *, timeout_s: float) -> tuple[int, int]:
        """Have it release what no stream needs; return the bytes its arrays held before, after."""

    async def share_disk(self, nbytes: int, *, timeout_s: float) -> None:
        """Have it keep at most so much of prompts on disk; what is beyond is gone afterwards."""

    async def unload(self, *, timeout_s: float) -> None:
        """Unload its model; the process stays."""

    async def adopt(self, controller: ProcessMark, *, output_path: str, timeout_s: float) -> None:
        """Have it follow `controller`, and write its output to a named pipe that has a reader."""

    async def shutdown(self, *, timeout_s: float) -> None:
        """Have the process end after it has answered; return it to its owner if not ours."""

    async def close(self) -> None:
        """Close the connection; running calls end."""


class Connect(Protocol):
    """Makes links."""

    def __call__(
        self, *, address: str, incarnation: str, digest: str, proof: Proof | None = None
    ) -> WorkerLink:
        """Return a link; the first call connects."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The outside worlds. `local_workers`: the workers are in this machine's process table.

    `endable_workers`: closing a worker's process ends it, so that one that hangs is ended.
    """

    launcher: Launcher
    connect: Connect
    probe: DeviceProbe
    clock: Clock
    local_workers: bool = True
    endable_workers: bool = True
    oom_kills: Callable[[str], int | None] = lambda _: None
    """Returns how many processes the kernel of a device's machine has killed for lack of memory, if
    that can be known."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A ready worker that another controller launched and this one adopts.

    `figures` are what it reports of itself, `holding` what is known of its load, `ref` the model as
    configured here, `device` where it lives, as the probe names it.
    """

    process: WorkerProcess
    link: WorkerLink
    figures: WorkerFigures
    holding: Holding
    ref: ModelRef
    device: str
