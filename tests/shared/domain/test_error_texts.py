"""What each error says to people, word by word: with all it can name, and with nothing of it."""

from __future__ import annotations

from dataclasses import fields

import pytest

from mlxd_shared.domain import errors
from mlxd_shared.domain.errors import FieldViolation, MlxdError
from tests.shared.wire.test_status import all_classes

GIB = 1 << 30
SIMPLE = {"str", "int", "float", "tuple[str, ...]", "tuple[FieldViolation, ...]"}
TERMS = {
    f"{name}_bytes": 10 + index
    for index, name in enumerate(
        ("weights", "kv", "prefix", "activations", "pool", "process"), start=1
    )
}
SPELT = "(weights 11 B, kv 12 B, prefix 13 B, activations 14 B, pool 15 B, process 16 B)"
TEXTS: tuple[tuple[MlxdError, str], ...] = (
    (
        errors.InvalidRequest((FieldViolation("a.b[1]", "1 is above 0"), FieldViolation("c", "d"))),
        "a.b[1]: 1 is above 0; c: d",
    ),
    (errors.FieldNotServed("migrate"), "migrate is not served by this version"),
    (errors.FieldNotServed("image", "base does not see images"), "image: base does not see images"),
    (errors.DuplicateRequest("r-1"), "request_id 'r-1' is in flight already"),
    (errors.ModelNotFound("gone", "try demo"), "no model 'gone': try demo"),
    (errors.NoChatTemplate("base"), "base has no chat template: send it text or tokens"),
    (errors.InvalidModel("not JSON", "config.json", "rope"), "config.json: rope: not JSON"),
    (errors.InvalidModel("not JSON", "config.json"), "config.json: not JSON"),
    (errors.InvalidModel("no files"), "no files"),
    (errors.PullFailed("a commit of nothing"), "a commit of nothing"),
    (errors.PullInterrupted("cut off", 2.0), "cut off"),
    (errors.HubUnavailable("no answer", 2.0), "no answer"),
    (errors.HubDenied("o/m is gated"), "o/m is gated"),
    (errors.StoreFull("the disk is full"), "the disk is full"),
    (
        errors.ExtraMissing("pulling", "hub"),
        "pulling needs the extra hub: pip install 'mlxd[hub]'",
    ),
    (
        errors.ModelTooLarge("big", 9 * GIB, 8 * GIB, GIB, "a shorter context"),
        "big needs 9.0 GiB, 8.0 GiB available after 1.0 GiB reserved; a shorter context",
    ),
    (
        errors.ModelTooLarge("big", 9, 8, 1, "fewer rows", **TERMS),
        f"big needs 9 B {SPELT}, 8 B available after 1 B reserved; fewer rows",
    ),
    (
        errors.NoRoom("big", 9, 8, 1.25),
        "big needs 9 B, 8 B available now after 0 B reserved, and nothing idle can be evicted",
    ),
    (
        errors.NoRoom("big", 9, 8, 1.25, 3, 2, *TERMS.values()),
        (
            f"big needs 9 B {SPELT}, 8 B available now after 2 B reserved, "
            "and nothing idle can be evicted (place 3 in the queue)"
        ),
    ),
    (
        errors.NoRoom("big", 9, 0, 1.25, lost="b/cpu, c/cpu"),
        "big needs 9 B, and what could hold it is lost: b/cpu, c/cpu",
    ),
    (errors.QueueFull("streams", 256, 0.5), "the queue of streams is full (limit 256)"),
    (
        errors.MachineShort("open files", "config.json", 2.5),
        "the machine lacks open files: config.json; try again later",
    ),
    (errors.NotAllowed("editor", "big"), "the key 'editor' is not for big"),
    (
        errors.KeyLimit("editor", "tokens a minute", 9, 1.0),
        "the key 'editor' has at most 9 tokens a minute",
    ),
    (errors.DeadlinePassed(3), "the deadline passed after 3 tokens"),
    (errors.ModelLoading("slow", 4.0, 0.625), "slow is still loading (62%)"),
    (errors.ModelDraining("going", 3.0), "going is draining and takes no new stream"),
    (errors.ModelUnloaded("gone"), "gone was unloaded by an operator"),
    (errors.WorkerStartFailed("bad"), "the worker of bad did not start"),
    (
        errors.WorkerTimedOut("bad", waited_s=9.7, cause="worker w: gone"),
        "the worker of bad made no progress for 10 s (worker w: gone)",
    ),
    (
        errors.WorkerExited("bad", code=-9),
        "the worker of bad exited with signal 9 before it was ready",
    ),
    (
        errors.WorkerExited("bad", code=3),
        "the worker of bad exited with code 3 before it was ready",
    ),
    (
        errors.WorkerTimedOut("bad", waited_s=120.0),
        "the worker of bad made no progress for 120 s",
    ),
    (errors.LoadAbandoned("left"), "the load of left was given up"),
    (
        errors.WorkerLost("lost", 17, "signal 9"),
        "the worker of lost was lost after 17 tokens (signal 9)",
    ),
    (
        errors.PoisonPrompt("poisoned", 2, 600.0),
        "2 workers of poisoned died of this prompt; it is refused for 600 s",
    ),
    (errors.WrongWorker("w-1", "w-2"), "asked for 'w-1', but this is worker 'w-2'"),
    (errors.BackendProblem("two backends"), "two backends"),
    (errors.BadCredentials("server.pem", "has expired"), "server.pem: has expired"),
    (errors.ShuttingDown(2.0), "the server is shutting down"),
    (errors.InternalError("abc123"), "internal error abc123; the server's log has the cause"),
)


@pytest.mark.parametrize(("error", "text"), TEXTS, ids=[type(error).__name__ for error, _ in TEXTS])
def test_an_error_says_what_happened(error: MlxdError, text: str) -> None:
    """And `str` says the same, for logs and tracebacks."""
    assert error.describe() == text
    assert text in str(error)


def test_every_error_is_listed() -> None:
    """A new one gets its row."""
    listed = {type(error) for error, _ in TEXTS}
    assert {kind for kind in all_classes(MlxdError) if not kind.__subclasses__()} <= listed


def test_every_error_is_a_dataclass_of_simple_fields() -> None:
    """What travels as text must be readable back: str, int and float only."""
    for example, _ in TEXTS:
        kinds = {field.type for field in fields(example)}  # type: ignore[arg-type]

        assert kinds <= SIMPLE
