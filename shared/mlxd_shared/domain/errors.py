"""The errors that mlxd expects, as one tree. Whatever is not in it is a bug.

Each is a dataclass whose fields travel as ErrorInfo metadata (see `status`), so that a client
gets back the same class with the same fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, dataclass_transform

from mlxd_shared.domain.units import format_bytes


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class MlxdError(Exception):
    """Root of every error that mlxd expects. What derives from it is a dataclass."""

    sentence: ClassVar[str] = ""
    """What `describe` says, with the names of fields in braces."""

    def __init_subclass__(cls, **options: Any) -> None:  # noqa: ANN401 - of whatever class
        super().__init_subclass__(**options)
        dataclass(eq=False)(cls)

    def __str__(self) -> str:
        return self.sentence.format_map(vars(self))

    def describe(self) -> str:
        """Return one sentence for the person who made the request."""
        return str(self)


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request and what is wrong with it, with the limit."""

    field: str
    description: str


class InvalidRequest(MlxdError):
    """A request that no server could honour."""

    violations: tuple[FieldViolation, ...]

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequest:
        """Return the error about one field."""
        return cls((FieldViolation(field, description),))

    def __str__(self) -> str:
        return "; ".join(f"{v.field}: {v.description}" for v in self.violations)


class FieldNotServed(MlxdError):
    """A field or method that exists on the wire but is not served yet."""

    field: str
    why: str = ""
    """Why not; empty: this version serves it nowhere."""
    sentence = "{field} is not served by this version"

    def __str__(self) -> str:
        return f"{self.field}: {self.why}" if self.why else self.sentence.format_map(vars(self))


class DuplicateRequest(MlxdError):
    """A request id that is in flight already."""

    request_id: str
    sentence = "request_id {request_id!r} is in flight already"


class ModelNotFound(MlxdError):
    """No model of this name."""

    model: str
    hint: str = ""

    def __str__(self) -> str:
        return f"no model {self.model!r}" + (f": {self.hint}" if self.hint else "")


class InvalidModel(MlxdError):
    """A model's files that cannot be served; `file` is a name, `field` a key or tensor in it."""

    problem: str
    file: str = ""
    field: str = ""

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.file, self.field) if part)
        return f"{place}: {self.problem}" if place else self.problem


class PullFailed(MlxdError):
    """A pull that failed, and would again; what has arrived stays for the next one."""

    problem: str
    sentence = "{problem}"


class PullInterrupted(PullFailed):
    """A pull that may succeed when it is tried again: what arrived was damaged or cut off."""

    retry_after_s: float = 1.0


class HubUnavailable(PullFailed):
    """A hub that does not answer, or not now."""

    retry_after_s: float = 30.0


class HubDenied(PullFailed):
    """A model that the hub does not give to whoever pulls: it is gated, or private."""


class StoreFull(PullFailed):
    """A disk without room for what would be pulled onto it."""


class ExtraMissing(MlxdError):
    """Something for which an extra is not installed where it would be done."""

    doing: str
    extra: str
    sentence = "{doing} needs the extra {extra}: pip install 'mlxd[{extra}]'"


class NoChatTemplate(MlxdError):
    """A conversation for a model that has no chat template."""

    model: str
    sentence = "{model} has no chat template: send it text or tokens"


def _list_terms(need: ModelTooLarge | NoRoom) -> str:
    """Return the terms of a need in brackets; nothing where none were given."""
    names = ("weights", "kv", "prefix", "activations", "pool", "process")
    terms = {name: int(vars(need)[f"{name}_bytes"]) for name in names}
    if not any(terms.values()):
        return ""
    return f" ({', '.join(f'{name} {format_bytes(nbytes)}' for name, nbytes in terms.items())})"


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

    def __str__(self) -> str:
        return (
            f"{self.model} needs {format_bytes(self.need_bytes)}{_list_terms(self)}, "
            f"{format_bytes(self.budget_bytes)} available"
            f" after {format_bytes(self.reserve_bytes)} reserved"
            + (f"; {self.hint}" if self.hint else "")
        )


class NoRoom(MlxdError):
    """A model that fits, but not now: everything that could make room is busy or pinned.

    `queue_position` is the model's place in the queue for memory, 1 for the next; 0: in none. The
    fields from `weights_bytes` on are the terms of its need. `lost` names the devices on which
    alone it could live, where their machines cannot be reached, with their attached workers.
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
    lost: str = field(default="", kw_only=True)

    def __str__(self) -> str:
        need = f"{self.model} needs {format_bytes(self.need_bytes)}{_list_terms(self)}"
        if self.lost:
            return f"{need}, and what could hold it is lost: {self.lost}"
        return (
            f"{need}, {format_bytes(self.available_bytes)} available now"
            f" after {format_bytes(self.reserve_bytes)} reserved, "
            "and nothing idle can be evicted"
            + (f" (place {self.queue_position} in the queue)" if self.queue_position else "")
        )


class QueueFull(MlxdError):
    """A bounded queue that is full."""

    queue: str
    limit: int
    retry_after_s: float = 1.0
    sentence = "the queue of {queue} is full (limit {limit})"


class MachineShort(MlxdError):
    """What the machine lacks just now: no model is at fault, nor the request."""

    resource: str
    doing: str
    retry_after_s: float = 5.0
    sentence = "the machine lacks {resource}: {doing}; try again later"


class DeadlinePassed(MlxdError):
    """The caller's deadline passed; `offset` tokens had been generated by then."""

    offset: int = 0

    def __str__(self) -> str:
        when = f"after {self.offset} tokens" if self.offset else "before the first token"
        return f"the deadline passed {when}"


class ModelLoading(MlxdError):
    """A model that is not ready yet."""

    model: str
    retry_after_s: float
    progress: float = 0.0
    sentence = "{model} is still loading ({progress:.0%})"


class ModelDraining(MlxdError):
    """A model that takes no new stream: it is being unloaded, or held so that it becomes idle."""

    model: str
    retry_after_s: float = 1.0
    sentence = "{model} is draining and takes no new stream"


class ModelUnloaded(MlxdError):
    """An operator's unload ended the stream."""

    model: str
    sentence = "{model} was unloaded by an operator"


class WorkerStartFailed(MlxdError):
    """A worker that did not become ready; `last_lines` is for the log and the status."""

    model: str
    last_lines: tuple[str, ...] = field(default=(), repr=False)
    sentence = "the worker of {model} did not start"


class WorkerExited(WorkerStartFailed):
    """A worker that ended before it was ready; a negative code is a signal."""

    code: int = 0

    def __str__(self) -> str:
        how = f"signal {-self.code}" if self.code < 0 else f"code {self.code}"
        return f"the worker of {self.model} exited with {how} before it was ready"


class WorkerTimedOut(WorkerStartFailed):
    """A worker that made no progress in time, or that was not there; `cause` is for people."""

    waited_s: float = 0.0
    cause: str = ""

    def __str__(self) -> str:
        cause = f" ({self.cause})" if self.cause else ""
        return f"the worker of {self.model} made no progress for {self.waited_s:.0f} s{cause}"


class LoadAbandoned(MlxdError):
    """A load that its last caller gave up."""

    model: str
    sentence = "the load of {model} was given up"


class WorkerLost(MlxdError):
    """A worker that died in the middle of a stream; nothing after `offset` was delivered."""

    model: str
    offset: int = 0
    cause: str = ""

    def __str__(self) -> str:
        cause = f" ({self.cause})" if self.cause else ""
        return f"the worker of {self.model} was lost after {self.offset} tokens{cause}"


class PoisonPrompt(MlxdError):
    """A prompt that `deaths` workers in a row died of; it is forgotten after a while."""

    model: str
    deaths: int
    retry_after_s: float
    sentence = (
        "{deaths} workers of {model} died of this prompt; it is refused for {retry_after_s:.0f} s"
    )


class WrongWorker(MlxdError):
    """A request for another worker process or another model."""

    asked: str
    incarnation: str
    sentence = "asked for {asked!r}, but this is worker {incarnation!r}"


class BackendProblem(MlxdError):
    """No MLX backend is installed, or more than one."""

    problem: str
    sentence = "{problem}"


class BadCredentials(MlxdError):
    """A certificate, key or token file that cannot be used. Never holds any of its content."""

    file: str
    problem: str
    sentence = "{file}: {problem}"


class NotAllowed(MlxdError):
    """A call that the caller's key is not for; `asked` is a scope, or a model."""

    key: str
    asked: str
    sentence = "the key {key!r} is not for {asked}"


class KeyLimit(MlxdError):
    """A key has used up a limit; `limit` is its allowance of `what`."""

    key: str
    what: str
    limit: int
    retry_after_s: float
    sentence = "the key {key!r} has at most {limit} {what}"


class ShuttingDown(MlxdError):
    """The server is stopping."""

    retry_after_s: float = 5.0
    sentence = "the server is shutting down"


class InternalError(MlxdError):
    """A bug. The cause is in the log under `error_id`, never on the wire."""

    error_id: str
    sentence = "internal error {error_id}; the server's log has the cause"
