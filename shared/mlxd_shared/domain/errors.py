"""The errors that mlxd expects, as one tree. Whatever is not in it is a bug.

MlxdError
├── InvalidRequest        a field is out of range or missing; names each field and its limit
├── FieldNotServed        a field or method that this server does not serve
├── DuplicateRequest      the request id is in flight already
├── ModelNotFound         no such name, alias, digest or path
├── NoChatTemplate        a conversation for a model that has no template for one
├── InvalidModel          the model's files cannot be served; names the file and the field
├── ModelTooLarge         does not fit, even with everything else evicted
├── NoRoom                would fit, but what could be evicted is busy or pinned
├── QueueFull             a bounded queue is full; names it and its limit
├── MachineShort          the machine lacks open files, memory or a disk; no model is at fault
├── DeadlinePassed        the caller's deadline passed before the stream was complete
├── ModelLoading          not ready within the time that the caller gave
├── ModelDraining         takes no new stream
├── ModelUnloaded         an operator's unload ended the stream
├── WorkerStartFailed     the worker did not become ready
│   ├── WorkerExited      it ended by itself (code or signal, last lines)
│   └── WorkerTimedOut    no progress in time (last lines)
├── LoadAbandoned         the caller gave up
├── WorkerLost            the worker died in the middle of a stream
├── PoisonPrompt          a prompt that workers died of
├── WrongWorker           another incarnation or model was asked for
├── BackendProblem        no MLX backend is installed, or more than one
├── BadCredentials        a certificate, key or token file cannot be used
├── ShuttingDown          the server is stopping
└── InternalError         a bug; the log holds the cause under an error id

Each is a dataclass whose fields travel as ErrorInfo metadata (see `status`), so that a client
gets back the same class with the same fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class MlxdError(Exception):
    """Root of every error that mlxd expects."""

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Return one sentence for the person who made the request."""
        return self.__doc__ or type(self).__name__


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request and what is wrong with it, with the limit."""

    field: str
    description: str


@dataclass(eq=False)
class InvalidRequest(MlxdError):
    """A request that no server could honour."""

    violations: tuple[FieldViolation, ...]

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequest:
        """Return the error about one field."""
        return cls((FieldViolation(field, description),))

    def describe(self) -> str:
        """Name every field."""
        return "; ".join(f"{v.field}: {v.description}" for v in self.violations)


@dataclass(eq=False)
class FieldNotServed(MlxdError):
    """A field or method that exists on the wire but is not served yet."""

    field: str

    def describe(self) -> str:
        """Name the field."""
        return f"{self.field} is not served by this version"


@dataclass(eq=False)
class DuplicateRequest(MlxdError):
    """A request id that is in flight already."""

    request_id: str

    def describe(self) -> str:
        """Name the id."""
        return f"request_id {self.request_id!r} is in flight already"


@dataclass(eq=False)
class ModelNotFound(MlxdError):
    """No model of this name."""

    model: str
    hint: str = ""

    def describe(self) -> str:
        """Name the model."""
        return f"no model {self.model!r}" + (f": {self.hint}" if self.hint else "")


@dataclass(eq=False)
class InvalidModel(MlxdError):
    """A model's files that cannot be served; `file` is a name, `field` a key or tensor in it."""

    problem: str
    file: str = ""
    field: str = ""

    def describe(self) -> str:
        """Name the file and the field."""
        place = ": ".join(part for part in (self.file, self.field) if part)
        return f"{place}: {self.problem}" if place else self.problem


@dataclass(eq=False)
class NoChatTemplate(MlxdError):
    """A conversation for a model that has no chat template."""

    model: str

    def describe(self) -> str:
        """Name the model, and what it takes instead."""
        return f"{self.model} has no chat template: send it text or tokens"


@dataclass(eq=False)
class ModelTooLarge(MlxdError):
    """A model that cannot fit, whoever is evicted; from `weights_bytes` on the need's terms."""

    model: str
    need_bytes: int
    budget_bytes: int
    reserve_bytes: int
    hint: str = ""
    weights_bytes: int = 0
    kv_bytes: int = 0
    prefix_bytes: int = 0
    activations_bytes: int = 0
    pool_bytes: int = 0
    process_bytes: int = 0

    def describe(self) -> str:
        """Give what is needed, by its terms, and what there is."""
        return (
            f"{self.model} needs {self.need_bytes} bytes{_list_terms(self)}, "
            f"{self.budget_bytes} available after {self.reserve_bytes} reserved"
            + (f"; {self.hint}" if self.hint else "")
        )


@dataclass(eq=False)
class NoRoom(MlxdError):
    """A model that fits, but not now: everything that could make room is busy or pinned.

    `queue_position` is the model's place in the queue for memory, 1 for the next; 0: in none. The
    fields from `weights_bytes` on are the terms of its need.
    """

    model: str
    need_bytes: int
    available_bytes: int
    retry_after_s: float
    queue_position: int = 0
    reserve_bytes: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    prefix_bytes: int = 0
    activations_bytes: int = 0
    pool_bytes: int = 0
    process_bytes: int = 0

    def describe(self) -> str:
        """Give what is needed, by its terms, and what there is."""
        return (
            f"{self.model} needs {self.need_bytes} bytes{_list_terms(self)}, "
            f"{self.available_bytes} available now after {self.reserve_bytes} reserved, "
            "and nothing idle can be evicted"
            + (f" (place {self.queue_position} in the queue)" if self.queue_position else "")
        )


def _list_terms(need: ModelTooLarge | NoRoom) -> str:
    """Return the terms of a need in brackets; nothing where none were given."""
    names = ("weights", "kv", "prefix", "activations", "pool", "process")
    terms = {name: int(vars(need)[f"{name}_bytes"]) for name in names}
    if not any(terms.values()):
        return ""
    return f" ({', '.join(f'{name} {nbytes}' for name, nbytes in terms.items())})"


@dataclass(eq=False)
class QueueFull(MlxdError):
    """A bounded queue that is full."""

    queue: str
    limit: int
    retry_after_s: float = 1.0

    def describe(self) -> str:
        """Name the queue and its limit."""
        return f"the queue of {self.queue} is full (limit {self.limit})"


@dataclass(eq=False)
class MachineShort(MlxdError):
    """What the machine lacks just now: no model is at fault, nor the request."""

    resource: str
    doing: str
    retry_after_s: float = 5.0

    def describe(self) -> str:
        """Name the resource, and what could not be done without it."""
        return f"the machine lacks {self.resource}: {self.doing}; try again later"


@dataclass(eq=False)
class DeadlinePassed(MlxdError):
    """The caller's deadline passed; `offset` tokens had been generated by then."""

    offset: int = 0

    def describe(self) -> str:
        """Tell how far the stream came."""
        when = f"after {self.offset} tokens" if self.offset else "before the first token"
        return f"the deadline passed {when}"


@dataclass(eq=False)
class ModelLoading(MlxdError):
    """A model that is not ready yet."""

    model: str
    retry_after_s: float
    progress: float = 0.0

    def describe(self) -> str:
        """Name the model and how far it is."""
        return f"{self.model} is still loading ({self.progress:.0%})"


@dataclass(eq=False)
class ModelDraining(MlxdError):
    """A model that is being unloaded and takes no new stream."""

    model: str
    retry_after_s: float = 1.0

    def describe(self) -> str:
        """Name the model."""
        return f"{self.model} is draining and takes no new stream"


@dataclass(eq=False)
class ModelUnloaded(MlxdError):
    """An operator's unload ended the stream."""

    model: str

    def describe(self) -> str:
        """Name the model."""
        return f"{self.model} was unloaded by an operator"


@dataclass(eq=False)
class WorkerStartFailed(MlxdError):
    """A worker that did not become ready; `last_lines` is for the log and the status."""

    model: str
    last_lines: tuple[str, ...] = field(default=(), repr=False)

    def describe(self) -> str:
        """Name the model."""
        return f"the worker of {self.model} did not start"


@dataclass(eq=False)
class WorkerExited(WorkerStartFailed):
    """A worker that ended before it was ready; a negative code is a signal."""

    code: int = 0

    def describe(self) -> str:
        """Tell code or signal."""
        how = f"signal {-self.code}" if self.code < 0 else f"code {self.code}"
        return f"the worker of {self.model} exited with {how} before it was ready"


@dataclass(eq=False)
class WorkerTimedOut(WorkerStartFailed):
    """A worker that made no progress in time."""

    waited_s: float = 0.0

    def describe(self) -> str:
        """Tell the time."""
        return f"the worker of {self.model} made no progress for {self.waited_s:.0f} s"


@dataclass(eq=False)
class LoadAbandoned(MlxdError):
    """A load that its last caller gave up."""

    model: str

    def describe(self) -> str:
        """Name the model."""
        return f"the load of {self.model} was given up"


@dataclass(eq=False)
class WorkerLost(MlxdError):
    """A worker that died in the middle of a stream; nothing after `offset` was delivered."""

    model: str
    offset: int = 0
    cause: str = ""

    def describe(self) -> str:
        """Tell how far the stream came."""
        cause = f" ({self.cause})" if self.cause else ""
        return f"the worker of {self.model} was lost after {self.offset} tokens{cause}"


@dataclass(eq=False)
class PoisonPrompt(MlxdError):
    """A prompt that `deaths` workers in a row died of; it is forgotten after a while."""

    model: str
    deaths: int
    retry_after_s: float

    def describe(self) -> str:
        """Tell how often, and for how long it is refused."""
        refused = f"it is refused for {self.retry_after_s:.0f} s"
        return f"{self.deaths} workers of {self.model} died of this prompt; {refused}"


@dataclass(eq=False)
class WrongWorker(MlxdError):
    """A request for another worker process or another model."""

    asked: str
    incarnation: str

    def describe(self) -> str:
        """Name both."""
        return f"asked for {self.asked!r}, but this is worker {self.incarnation!r}"


@dataclass(eq=False)
class BackendProblem(MlxdError):
    """No MLX backend is installed, or more than one."""

    problem: str

    def describe(self) -> str:
        """Say what to install."""
        return self.problem


@dataclass(eq=False)
class BadCredentials(MlxdError):
    """A certificate, key or token file that cannot be used. Never holds any of its content."""

    file: str
    problem: str

    def describe(self) -> str:
        """Name the file."""
        return f"{self.file}: {self.problem}"


@dataclass(eq=False)
class ShuttingDown(MlxdError):
    """The server is stopping."""

    retry_after_s: float = 5.0

    def describe(self) -> str:
        """Say so."""
        return "the server is shutting down"


@dataclass(eq=False)
class InternalError(MlxdError):
    """A bug. The cause is in the log under `error_id`, never on the wire."""

    error_id: str

    def describe(self) -> str:
        """Name the id to look for."""
        return f"internal error {self.error_id}; the server's log has the cause"
