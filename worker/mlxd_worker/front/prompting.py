"""What a request gives the model to read: text, ids or a conversation, as ids that fit the context.

Invariants:
- Whatever takes long runs off the event loop, within limits.
- A conversation's answer is parsed by the model family's parser from its first text on, even if the
  stream is resumed: what an earlier worker has sent is parsed again, but not sent again.
- A response format constrains the whole output, so that nothing else is constrained beside it.
- If the model's template has no form for calls, or its tokens cannot be constrained, calls are left
  to the model, unless they are required or a tool is strict: such a request is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mlxd_models.files.image_settings import unseen
from mlxd_shared import config
from mlxd_shared.domain.chats import Chat, chat_images
from mlxd_shared.domain.errors import FieldNotServed, InvalidRequest, NoChatTemplate
from mlxd_shared.domain.requests import GenerateSpec
from mlxd_shared.wire.intake import run_paced
from mlxd_worker.chat.answer import Answer
from mlxd_worker.chat.parsing.pieces import Begin, Tools, tools_of
from mlxd_worker.chat.parsing.registry import OutputFormat
from mlxd_worker.constraints.calls.grammar import FIELD, CallFormat, marks_of
from mlxd_worker.constraints.calls.offers import read_offers
from mlxd_worker.engine.masks.calls import CallConstraint
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.request import Image
from mlxd_worker.engine.text import TextStream
from mlxd_worker.front.worker import Worker
from mlxd_worker.thread.facts import Loaded
from mlxd_worker.vision.room import Pixels
from mlxd_worker.vision.sight import place_images


@dataclass(frozen=True, slots=True)
class Calls:
    """The format of an answer's calls, and how the answer begins."""

    wanted: CallFormat
    begin: Begin


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads, and how its answer is parsed."""

    ids: tuple[int, ...]
    answer: Answer | None = None
    """Parses the answer into parts; None: it is one text."""
    shown: Mapping[int, str] = field(default_factory=dict)
    """The special ids that are part of the text even if others are left out."""
    calls: Calls | None = None
    """The constraint on its calls; None: there is none."""
    images: tuple[Image, ...] = ()
    """What stands in it instead of tokens."""
    keys: tuple[int, ...] = ()
    """What it is looked up by; empty: by its ids."""


async def prompt_of(worker: Worker, spec: GenerateSpec, loaded: Loaded, request_id: str) -> Prompt:
    """Return a request's prompt, with at least one id and fewer than the context holds.

    Raises:
        InvalidRequest: it makes no prompt that this model can read; names the field.
        FieldNotServed: an image, and the model reads text alone; names it.
        NoChatTemplate, InvalidModel: the model's files have no usable form for a conversation.
        QueueFull: too many conversations wait to be rendered.
    """
    match spec.prompt:
        case str(text):
            check_length(len(text), loaded, field="text")
            ids = await worker.tokens.encode(loaded.tokenizer, text, field="text", kind="generate")
            prompt = Prompt(await run_paced(_check_ids, ids, spec, loaded, field="text"))
        case Chat() as chat:
            prompt = await _chat_prompt(worker, spec, chat, loaded, request_id)
        case ids:
            prompt = Prompt(await run_paced(_check_ids, ids, spec, loaded, field="tokens"))
    return prompt


async def _chat_prompt(
    worker: Worker, spec: GenerateSpec, chat: Chat, loaded: Loaded, request_id: str
) -> Prompt:
    _refuse_unseen(chat, loaded)
    wanted, sight = loaded.chat, loaded.sight
    if wanted is None:
        raise NoChatTemplate(loaded.job.name)
    chars = sum(len(message.text) + len(message.reasoning) for message in chat.messages)
    check_length(chars, loaded, field="chat.messages")
    _check_images(chat, loaded)
    images = () if sight is None else await worker.showings.read(request_id, chat, sight)
    rendered = await worker.chats.render(wanted, chat, worker.tokens)
    check = partial(_place, rendered.ids, images, spec, loaded)
    # A template, or images, may make many ids of a small request.
    is_short = len(rendered.ids) <= config.TOKENIZE_SHORT_IDS_MAX and not images
    prompt = check() if is_short else await asyncio.to_thread(check)
    if not chat.parses and not chat.requires_call:
        return prompt
    continued = chat.messages[-1].text if chat.continues else None
    begin = wanted.output.begin(rendered.tail, continued)
    tools = await run_paced(tools_of, chat.offered)
    calls = call_format(spec, tools, loaded, wanted.output, begin)
    if not chat.parses:
        return replace(prompt, calls=calls)
    # Bare JSON is not a call if JSON was requested.
    bare = wanted.output.bare_json and spec.response_format is not None
    output = wanted.output.without_calls() if bare else wanted.output
    parser = output.parser(tools, prompt=rendered.tail, continued=continued, held=calls is not None)
    answer = Answer(parser, request_id)
    if spec.resumed:
        await asyncio.to_thread(_read_again, answer, spec, loaded, wanted.shown)
    return replace(prompt, answer=answer, shown=wanted.shown, calls=calls)


def _refuse_unseen(chat: Chat, loaded: Loaded) -> None:
    """Refuse images where the model reads text alone.

    Raises:
        FieldNotServed: names the first image.
    """
    if loaded.sight is None:
        for field, _ in chat_images(chat):
            raise FieldNotServed(field, unseen(loaded.job.name, loaded.unseeing))


def _check_images(chat: Chat, loaded: Loaded) -> None:
    """Refuse images that the context has no room for, before any is decoded.

    Raises:
        InvalidRequest: there are too many.
    """
    if loaded.sight is None:
        return
    images, sizes = sum(1 for _ in chat_images(chat)), loaded.sight.sizes
    if images * sizes.tokens_least >= loaded.context_length:
        least = f"{'at least ' if sizes.varies else ''}{sizes.tokens_least}"
        limit = (
            f"the prompt has {images} images of {least} tokens; "
            f"the context of {loaded.context_length} takes at most {loaded.context_length - 1}"
        )
        raise InvalidRequest.of("chat.messages", limit)


def _place(
    ids: Sequence[int], images: tuple[Pixels, ...], spec: GenerateSpec, loaded: Loaded
) -> Prompt:
    """Return a chat's prompt: its ids with images in their places, of which none has more."""
    if not images or loaded.sight is None:
        return Prompt(_check_ids(ids, spec, loaded, field="chat"))
    named = [(image.name, image.colours) for image in images]
    grids = [image.grid for image in images]
    placed = place_images(ids, named, loaded.sight.sizes, grids)
    checked = _check_ids(placed.ids, spec, loaded, field="chat")
    return Prompt(checked, images=placed.images, keys=placed.keys)


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


def _read_again(
    answer: Answer, spec: GenerateSpec, loaded: Loaded, shown: Mapping[int, str]
) -> None:
    """Parse the text of the tokens before again, as it was sent then."""
    text = TextStream(
        loaded.tokenizer.detokenizer(
            skip_special=spec.skip_special_tokens,
            anchored=spec.holds_all,
            shown=shown,
        ),
        spec.stop,
    )
    texts: list[str] = []
    for index, token_id in enumerate(spec.resumed):
        piece = text.push(token_id, may_end=index + 1 >= spec.min_tokens)
        texts.append(piece.text)
        if piece.stop is not None:  # the engine refuses such a stream by name
            break
    answer.read("".join(texts), ends=False)


def _check_ids(
    prompt: Sequence[int], spec: GenerateSpec, loaded: Loaded, *, field: str
) -> tuple[int, ...]:
    """Return a prompt's ids if the model can read them and answer."""
    ids = check_ids(prompt, loaded, field=field)
    if len(prompt) + spec.min_tokens > loaded.context_length:
        limit = (
            f"{spec.min_tokens} is above the {loaded.context_length - len(prompt)} tokens that the "
            f"context of {loaded.context_length} has left after the prompt"
        )
        raise InvalidRequest.of("min_tokens", limit)
    return ids


def check_ids(
    ids: Sequence[int], loaded: Loaded, *, field: str, what: str = "prompt"
) -> tuple[int, ...]:
    """Return a text's ids if the model can read them.

    Raises:
        InvalidRequest: there are none, more than the context holds, or one beyond the vocabulary.
    """
    if not ids:
        raise InvalidRequest.of(field, f"the {what} has no tokens; at least one is needed")
    if len(ids) >= loaded.context_length:
        limit = (
            f"the {what} has {len(ids)} tokens; the context of {loaded.context_length} "
            f"takes at most {loaded.context_length - 1}"
        )
        raise InvalidRequest.of(field, limit)
    if max(ids) >= loaded.vocab_size:  # from a text: MLX would read beyond the embedding
        limit = (
            f"the tokenizer makes it token {max(ids)}, which the model does not have; "
            f"its vocabulary has {loaded.vocab_size} tokens"
        )
        raise InvalidRequest.of(field, limit)
    return tuple(ids)


def check_length(chars: int, loaded: Loaded, *, field: str) -> None:
    """Refuse a text that the context could not hold even if every token were the longest one.

    Tokenising it first could take a minute, and memory for every one of its tokens.
    """
    chars_max = loaded.tokenizer.chars_max(loaded.context_length)
    if chars > chars_max:
        limit = (
            f"the prompt has {chars} characters; the context of {loaded.context_length} "
            f"tokens takes at most {chars_max}"
        )
        raise InvalidRequest.of(field, limit)
