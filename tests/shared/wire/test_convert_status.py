"""Figures of workers, from the wire and back: nothing that a worker says is lost."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from mlxd.v1 import status_pb2, types_pb2
from mlxd_shared.domain.figures import HostMemory, ModelState, ProcessStatus, WorkerFigures
from mlxd_shared.domain.requests import KVFormat, Weights
from mlxd_shared.wire.convert_status import figures_from_pb, process_from_pb
from mlxd_shared.wire.records import write

FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
LATER = 99
"""A value that no enum has today."""


def fill(message: Message) -> None:
    """Give every field, those of messages within too, a value that is not its default."""
    if isinstance(message, Timestamp | Duration):
        message.seconds, message.nanos = 7, 5000  # a float of seconds holds microseconds
        return
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value[field.number] = 0.5
        elif field.message_type is not None:
            fill(value.add() if field.is_repeated else value)
        elif field.is_repeated:
            value.append(field.name)
        else:
            setattr(message, field.name, plain(field))


def plain(field: Any) -> object:
    """Return a value of a field's type, another one for each field."""
    if field.cpp_type in FLOATS:
        return field.number + 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return field.name
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return True
    return 1 if field.enum_type is not None else field.number


def test_all_that_a_worker_says_comes_back() -> None:
    """Every field of the message, also one that is added to it later."""
    status_message = status_pb2.WorkerStatus()
    fill(status_message)

    assert len(status_message.ListFields()) == len(status_message.DESCRIPTOR.fields)
    assert write(figures_from_pb(status_message), status_pb2.WorkerStatus) == status_message


def test_what_is_not_said_stays_so() -> None:
    """An empty message is the default, and the default an empty message."""
    assert figures_from_pb(status_pb2.WorkerStatus()) == WorkerFigures()
    assert write(WorkerFigures(), status_pb2.WorkerStatus) == status_pb2.WorkerStatus()


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({"weights": types_pb2.WEIGHTS_FORMAT_Q8, "kv_format": types_pb2.KV_FORMAT_Q4}, True),
        ({"weights": LATER}, False),
        ({"kv_format": LATER}, False),
    ],
)
def test_forms_of_a_later_version_are_known_as_such(fields: dict[str, int], *, known: bool) -> None:
    """They are nothing that could be reckoned with, and are told apart from none."""
    figures = figures_from_pb(status_pb2.WorkerStatus(**fields))  # type: ignore[arg-type]

    assert figures.form_is_known is known
    assert (figures.weights, figures.kv_format) == (
        (Weights.Q8, KVFormat.Q4) if known else (Weights.AUTO, None)
    )


def test_states_are_those_of_the_wire() -> None:
    """Each has one of its own; a later one is unknown, and not mistaken for any."""
    messages = [status_pb2.WorkerStatus(state=number) for number in types_pb2.ModelState.values()]
    assert {figures_from_pb(message).state for message in messages} == set(ModelState)
    written = [write(figures_from_pb(each), status_pb2.WorkerStatus) for each in messages]
    assert written == messages
    later = status_pb2.WorkerStatus(state=LATER)  # type: ignore[arg-type]
    assert figures_from_pb(later).state is ModelState.UNKNOWN


def test_a_process_tells_of_its_machine_and_of_all_its_workers() -> None:
    """In the order in which it names them."""
    status_message = status_pb2.Status(
        version="1.2",
        host_memory=status_pb2.HostMemory(
            machine="a", machine_id="id", total_bytes=9, available_bytes=4
        ),
        workers=[status_pb2.WorkerStatus(pid=1), status_pb2.WorkerStatus(pid=2)],
    )

    workers = (WorkerFigures(pid=1), WorkerFigures(pid=2))
    host = HostMemory("a", "id", total_nbytes=9, available_nbytes=4)
    assert process_from_pb(status_message) == ProcessStatus("1.2", host, workers)
