"""What the calls in an answer are constrained to, by the tools of its conversation.

Invariants:
- A response format constrains the whole output, so that nothing else is constrained beside it.
- If the model's template has no form for calls, or its tokens cannot be constrained, calls are left
  to the model, unless they are required or a tool is strict: such a request is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_shared.domain.chats import Chat
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import GenerateSpec
from mlxd_worker.chat.parsing.pieces import Begin, Tools
from mlxd_worker.chat.parsing.registry import OutputFormat
from mlxd_worker.constraints.calls.grammar import FIELD, CallFormat, marks_of
from mlxd_worker.constraints.calls.offers import read_offers
from mlxd_worker.engine.masks.calls import CallConstraint
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.front.worker import Worker
from mlxd_worker.thread.facts import Loaded


@dataclass(frozen=True, slots=True)
class Calls:
    """The format of an answer's calls, and how the answer begins."""

    wanted: CallFormat
    begin: Begin


def call_format(
    spec: GenerateSpec, tools: Tools, loaded: Loaded, output: OutputFormat, begin: Begin
) -> Calls | None:
    """Return the constraint on the calls of a chat's answer; None: there is none.

    Raises:
        InvalidRequest: a call is required, and there is no function or the model has no form for
            it; or a tool is strict, and calls cannot be held.
    """
    chat = spec.prompt
    assert isinstance(chat, Chat), "asked of conversations"
    if spec.response_format is not None or not (tools.offered or chat.requires_call):
        return None
    wanted = CallFormat(
        output,
        chat.offered,
        required=chat.requires_call,
        name=chat.tool_name,
        several=chat.parallel_tool_calls is not False,
        reasoning=begin.reasoning and chat.requires_call,
    )
    if wanted.is_writable and loaded.constraints.are_served:
        return Calls(wanted, begin)
    if chat.requires_call:
        raise InvalidRequest.of(FIELD, "this model has no form for calls that can be required")
    strict = (offer for offer in read_offers(chat.offered) if offer.schema is not None)
    first = next(strict, None) if wanted.is_writable else None
    if first is not None:
        raise InvalidRequest.of(first.field, "this model's calls cannot be held to a schema")
    return None


async def compile_calls(
    worker: Worker, calls: Calls, loaded: Loaded
) -> Constraint | CallConstraint:
    """Return the grammar of an answer that is calls, or of the calls in an answer.

    Raises:
        InvalidRequest: a tool whose calls cannot be held; names its field.
        QueueFull: too many wait to be compiled.
    """
    wanted = calls.wanted
    grammar = await worker.formats.compile(loaded.constraints, wanted)
    if wanted.required:
        return grammar
    marks = marks_of(wanted.output, calls.begin)
    return loaded.constraints.watch(grammar, marks, ends=not wanted.several)
