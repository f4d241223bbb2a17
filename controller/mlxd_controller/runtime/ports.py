"""The seams of the controller: each outside world as one Protocol, with a fake in tests/fakes.

Everything here is used from the event loop's thread. A method that waits is a coroutine; one that
is not never blocks.
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
    """What keeps a model."""

    FOLDER = "folder"
    """Named to the server, one by one."""
    MODELS = "models"
    """mlxd's own directory of models."""
    HUB = "hub"
    """The cache of Hugging Face's libraries."""
    OLLAMA = "ollama"
    """Ollama's manifests and blobs."""


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model that can be served: its identity, its names, and what its files state."""

    digest: str
    name: str
    aliases: tuple[str, ...]
    path: Path
    facts: ModelFacts
    defaults: SamplingOptions
    """What the model's files say about sampling."""
    store: StoreKind = StoreKind.FOLDER
    has_pooling: bool = False
    """Whether its files say how its texts become vectors."""
    has_chat_template: bool = False
    configured: LoadSpec = NOTHING_FIXED
    """What the operator's configuration fixes for loads of it."""


@dataclass(frozen=True, slots=True)
class BrokenRef:
    """A name whose files cannot be served."""

    name: str
    path: Path
    error: MlxdError
    store: StoreKind = StoreKind.FOLDER


class ModelStore(Protocol):
    """Names to models. Reading files is done off the event loop."""

    async def resolve(self, name: str) -> ModelRef:
        """Return the model of a name, alias or digest, as its files are now.

        Raises:
            ModelNotFound: no such name.
            InvalidModel: its files cannot be served.
        """

    def only_name(self) -> str:
        """Return the name to take where none is given.

        Raises:
            InvalidRequest: there is not exactly one model.
        """

    async def inspect(self, path: Path, *, name: str) -> ModelRef:
        """Return the model of a folder as `add` would, without taking it in."""

    async def add(
        self, path: Path, *, name: str, in_use: Callable[[], Collection[str]] = tuple
    ) -> ModelRef:
        """Take a folder in under `name` (empty: the folder's own) and return its model.

        Another name may be forgotten for it: that of no model that `in_use` returns at that moment,
        as digests and paths, and of no alias.

        Raises:
            ModelNotFound: no such folder.
            InvalidModel: its files cannot be served.
            InvalidRequest: the name is taken by another folder, or is not a name; or the folder has
                as many as may be.
            QueueFull: there are as many names as may be, and all are needed.
        """

    def use(self, name: str) -> None:
        """Note that a request has named a model so: names are forgotten by their last use."""

    async def forget(
        self, name: str, *, in_use: Callable[[], Collection[str]] = tuple
    ) -> tuple[str, ...]:
        """Forget a name that `add` gave, and return the other names that its folder has.

        Raises:
            ModelNotFound: no such name.
            InvalidRequest: the name comes from elsewhere (configuration, an alias, a store), or is
                the last one of a model that `in_use` returns.
        """

    def telling(self, listener: Callable[[str], None]) -> AbstractContextManager[None]:
        """Have each name that is forgotten told, at once, while the body runs."""

    async def list_models(self) -> tuple[ModelRef | BrokenRef, ...]:
        """Return every model once, sorted by name."""

    def find_known(self, digest: str) -> ModelRef | None:
        """Return the model of a digest as it was last read."""


class DeviceProbe(Protocol):
    """What memory there is."""

    def read(self, own_pids: Iterable[int]) -> tuple[Device, ...]:
        """Return the devices as they are now; what `own_pids` hold counts as usable.

        At least one, in a fixed order. One whose machine cannot be reached stays among them, `lost`
        and with its last figures; before it is said to be, all workers there have ended, and none
        starts there any more. What a worker holds that the scheduler does not know of, as on a
        machine that is back, is others' memory.
        """

    def machines(self) -> tuple[HostMemory, ...]:
        """Return the memory of the machines on which workers run, lost ones too; () is this one."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A model that a worker holds ready, as a controller that comes after this one must know it.

    `spec` is what operators and requests fixed, `load_s` what the load took.
    """

    digest: str
    name: str
    path: str
    spec: LoadSpec
    load_s: float


class WorkerProcess(Protocol):
    """One worker process, from the moment it listens. Its end is seen by every waiter alike."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def address(self) -> str:
        """What gRPC dials."""

    @property
    def incarnation(self) -> str:
        """Its identity; no other process ever has it."""

    @property
    def proof(self) -> Proof | None:
        """By what it takes a request as checked; None where it has told this controller nothing."""

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative: the signal that ended it."""

    @property
    def output(self) -> KeptLines:
        """What it has written, as far as that is kept; closed once it has ended."""

    def last_lines(self) -> tuple[str, ...]:
        """Return its last lines of output, oldest first."""

    def remember(self, holding: Holding | None) -> None:
        """Leave word of what it holds for a controller after this one; None: nothing to take over.

        Where others look after the worker, there is nothing to do.
        """

    async def wait_exited(self) -> int:
        """Return the exit code once the process has ended, its output is read and it is reaped."""

    async def close(self) -> int:
        """End it: interrupt, a grace, kill, reap. Idempotent; concurrent calls get one answer."""


class Launcher(Protocol):
    """Starts worker processes."""

    async def launch(self, *, model: str, incarnation: str, device: str = "") -> WorkerProcess:
        """Start a worker, or take one that runs, and return it once it listens.

        `model` is the name of what it will load, `device` the one to use, as the probe names it;
        "" leaves that to the worker. A worker that runs has its own incarnation.

        Cancelling gives up: the process is ended and reaped before CancelledError goes on.

        Raises:
            WorkerExited: it ended before it listened (code, last lines).
            WorkerTimedOut: it neither listened nor ended in time (last lines); it is ended.
            BackendProblem, WorkerStartFailed: it said why it cannot serve.
        """


class RawStream(Protocol):
    """A Generate on a worker, as serialised messages."""

    async def read(self) -> bytes | None:
        """Return the next message, None at the end.

        Raises:
            MlxdError: the worker's own error, with its details; or RemoteError.
        """

    def cancel(self) -> None:
        """Tell the worker to stop; idempotent."""


class Question(StrEnum):
    """What a worker answers with one message, by its method of InferenceService."""

    TOKENIZE = "Tokenize"
    DETOKENIZE = "Detokenize"
    EMBED = "Embed"
    SCORE = "Score"


class WorkerLink(Protocol):
    """Everything the controller asks of one worker; adds model and incarnation by itself.

    What clients ask of a model goes through as bytes: the services parse and check its messages,
    nobody else; the worker is told so if it has given this controller a proof.
    Every method raises the worker's own MlxdError, or RemoteError where gRPC itself failed.
    """

    def load(self, name: str, path: str, spec: LoadSpec) -> AsyncGenerator[LoadProgress, None]:
        """Load and yield the progress; complete when the stream ends without an error."""

    def generate(self, request: Checked, *, timeout_s: float | None) -> RawStream:
        """Start a Generate with a serialised request, whose model and incarnation are ignored."""

    async def ask(self, question: Question, request: Checked, *, timeout_s: float | None) -> bytes:
        """Have the worker answer; a serialised message in and out, as with `generate`."""

    async def status(self, *, timeout_s: float) -> ProcessStatus:
        """Return what the worker says of itself."""

    def watch(self, *, interval_s: float) -> AsyncGenerator[ProcessStatus, None]:
        """Yield what the worker says of itself, now and at every interval, until it stops."""

    async def shrink(self, target_bytes: int, *, timeout_s: float) -> tuple[int, int]:
        """Have it give back what no stream needs; return what its arrays held before and after."""

    async def share_disk(self, nbytes: int, *, timeout_s: float) -> None:
        """Have it keep at most so much of prompts on disk; what is beyond is gone afterwards."""

    async def unload(self, *, timeout_s: float) -> None:
        """Have it drop its model; the process stays."""

    async def adopt(self, controller: ProcessMark, *, output_path: str, timeout_s: float) -> None:
        """Have it follow `controller`, and write its output to a named pipe that has a reader."""

    async def shutdown(self, *, timeout_s: float) -> None:
        """Tell the process to end after it has answered; give it back where others started it."""

    async def close(self) -> None:
        """Let go of the connection; running calls end."""


class Connect(Protocol):
    """Makes links."""

    def __call__(
        self, *, address: str, incarnation: str, digest: str, proof: Proof | None = None
    ) -> WorkerLink:
        """Return a link; the connection is made by the first call."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The outside worlds. `local_workers`: this machine's process table tells of the workers."""

    launcher: Launcher
    connect: Connect
    probe: DeviceProbe
    clock: Clock
    local_workers: bool = True
    oom_kills: Callable[[], int | None] = lambda: None
    """Returns how often the kernel of the workers' machine has ended a process for want of memory,
    if that can be known."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A ready worker that this controller did not launch, and uses from now on.

    `figures` are what it said of itself, `holding` what is known of its load, `ref` the model as it
    is configured here, `device` where it lives, as the probe names it.
    """

    process: WorkerProcess
    link: WorkerLink
    figures: WorkerFigures
    holding: Holding
    ref: ModelRef
    device: str
