"""One stream from its specification to its events: check, tokenise off the loop, submit, read.

Invariants:
- Every choice that depends on the model is made here, before the engine sees the request.
- The engine is told the stream's end from here, however it ends: by itself, by its client, by a
  deadline, or by a fault.
"""

from __future__ import annotations

import os
import time
import uuid
from array import array
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import GenerateSpec, check_vocabulary, merge, resolve
from mlxd_shared.wire.intake import run_paced
from mlxd_worker.chat.answer import Answer, PartPiece
from mlxd_worker.engine.masks.calls import CallConstraint
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.request import Finished, PositionLogprobs, Submit, Tokens
from mlxd_worker.front.prompting import Prompt, compile_calls, prompt_of
from mlxd_worker.front.worker import Worker
from mlxd_worker.thread.facts import Loaded
from mlxd_worker.tokenizing.process import IDS


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """A prompt as the model reads it; text and ids are empty unless it is echoed."""

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    """Those of each of its tokens from the second on, if requested."""


@dataclass(frozen=True, slots=True)
class Part:
    """The content of one message of a stream."""

    request_id: str
    model_digest: str
    event: Tokens | Finished
    seed: int | None
    """The seed in use, only on the first message."""
    pieces: tuple[PartPiece, ...] = ()
    """The pieces of a chat's answer, if it is parsed; the event's text is then that of the text
    parts."""
    prompt: PromptEcho | None = None
    """The prompt, on the first message, if requested."""
    prompt_tokens: int = 0
    """How many tokens the prompt has."""


async def generate(
    worker: Worker, spec: GenerateSpec, loaded: Loaded, *, left_s: float | None = None
) -> AsyncGenerator[Part, None]:
    """Yield one stream's events, merged if the reader is slow, the first token alone.

    left_s: seconds until the deadline; None: no deadline.

    Raises:
        InvalidRequest: this model cannot honour something; names the field and the limit.
        DuplicateRequest: the request id is in use.
        QueueFull: too many streams wait.
        DeadlinePassed: `left_s` have passed; gRPC ends the call then as well.
        MlxdError: whatever ended the stream.
    """
    accepted_s = time.monotonic()
    await run_paced(check_vocabulary, spec, loaded.vocab_size)
    request_id = spec.request_id or uuid.uuid4().hex
    with (
        worker.streams.open(request_id, rows_max=loaded.rows_max) as stream,
        worker.showings.open(request_id),
    ):
        prompt = await prompt_of(worker, spec, loaded, request_id)
        await run_paced(_check_resumed, spec, loaded, prompt.ids)
        echo = await echo_of(worker, spec, loaded, prompt.ids)
        constraint = await _compile(worker, spec, loaded, prompt)
        reader = worker.engine.reader()
        drawn = int.from_bytes(os.urandom(8), "little")
        request = Submit(
            stream=stream,
            sampling=resolve(merge(spec.sampling, loaded.sampling), seed=drawn),
            max_tokens=spec.max_tokens,
            stop=spec.stop,
            stop_token_ids=frozenset(spec.stop_token_ids),
            eos_ids=_eos_of(spec, loaded),
            skip_special_tokens=spec.skip_special_tokens,
            submitted_s=accepted_s,
            age_s=max(spec.age_s, 0.0),
            sink=reader,
            min_tokens=spec.min_tokens,
            top_logprobs=spec.top_logprobs,
            prompt_logprobs=None if echo is None else spec.prompt_logprobs,
            speculation_depth=spec.speculation_depth,
            request_id=request_id,
            priority=spec.priority,
            deadline_s=None if left_s is None else accepted_s + left_s,
            constraint=constraint,
            shown=prompt.shown,
            prompt=prompt.ids,
            images=prompt.images,
            keys=prompt.keys,
        )
        request = _replay(request, spec.resumed, steps_max=worker.replay_steps_max)
        seed: int | None = request.sampling.seed
        ended = False
        with worker.running(request, loaded):
            while not ended:
                event = await reader.next()
                ended = isinstance(event, Finished)
                if echo is not None:
                    echo = replace(echo, logprobs=event.prompt_logprobs)
                part = Part(
                    request_id,
                    loaded.job.digest,
                    event,
                    seed,
                    prompt=echo,
                    prompt_tokens=request.prompt_tokens,
                )
                yield part if prompt.answer is None else _tell_apart(part, prompt.answer)
                seed = echo = None


def _replay(request: Submit, resumed: tuple[int, ...], *, steps_max: int) -> Submit:
    """Return a request that goes on from the output of an earlier worker."""
    if len(resumed) <= steps_max:
        return replace(request, forced=resumed)
    keys = request.keys and request.keys + resumed
    return replace(request, prompt=request.prompt + resumed, keys=keys, resumed=len(resumed))


async def echo_of(
    worker: Worker, spec: GenerateSpec, loaded: Loaded, ids: tuple[int, ...]
) -> PromptEcho | None:
    """Return the echo of a prompt, without log-probabilities yet; None: there is none.

    A resumed stream has sent it already, and so has the first of several choices.

    Raises:
        InvalidRequest: more log-probabilities than one message holds.
    """
    wanted = spec.prompt_logprobs
    if spec.resumed or spec.choice or not (spec.echo or wanted is not None):
        return None
    if wanted is not None and len(ids) * (1 + wanted) > config.PROMPT_LOGPROBS_MAX:
        limit = f"{len(ids)} tokens and {wanted} beside each are more than"
        raise InvalidRequest.of("prompt_logprobs", f"{limit} {config.PROMPT_LOGPROBS_MAX}")
    if not spec.echo:
        return PromptEcho()
    if isinstance(spec.prompt, str):
        return PromptEcho(spec.prompt, ids)
    text = await worker.tokens.decode(
        loaded.tokenizer, array(IDS, ids), skip_special=False, field="echo", kind="generate"
    )
    return PromptEcho(text, ids)


async def _compile(
    worker: Worker, spec: GenerateSpec, loaded: Loaded, prompt: Prompt
) -> Constraint | CallConstraint | None:
    """Return what the output, or each call in it, must match; None: nothing."""
    if spec.response_format is not None:
        return await worker.formats.compile(loaded.constraints, spec.response_format)
    if prompt.calls is None:
        return None
    return await compile_calls(worker, prompt.calls, loaded)


def _tell_apart(part: Part, answer: Answer) -> Part:
    """Return a part of a chat's stream with the pieces of its text."""
    event = part.event
    pieces = answer.read(event.text, ends=isinstance(event, Finished))
    text = "".join(piece.text for piece in pieces if not piece.reasoning)
    return replace(part, event=replace(event, text=text), pieces=pieces)


def _check_resumed(spec: GenerateSpec, loaded: Loaded, prompt: tuple[int, ...]) -> None:
    """Refuse to resume from tokens that this request cannot have generated."""
    resumed = spec.resumed
    if not resumed:
        return
    bad = next((i for i, token in enumerate(resumed) if token >= loaded.vocab_size), None)
    if bad is not None:
        limit = f"{resumed[bad]} is not a token id; the vocabulary has {loaded.vocab_size} tokens"
        raise InvalidRequest.of(f"resume_token_ids[{bad}]", limit)
    ends = _eos_of(spec, loaded) | set(spec.stop_token_ids)
    bad = next((i for i, token in enumerate(resumed) if token in ends), None)
    if bad is not None:
        limit = f"token {resumed[bad]} ends the stream: it is never part of the output"
        raise InvalidRequest.of(f"resume_token_ids[{bad}]", limit)
    if len(prompt) + len(resumed) >= loaded.context_length:
        limit = (
            f"prompt and output have {len(prompt) + len(resumed)} tokens; the context of "
            f"{loaded.context_length} is full: the stream had ended"
        )
        raise InvalidRequest.of("resume_token_ids", limit)
    options = merge(spec.sampling, loaded.sampling)
    if options.seed is None and options.temperature != 0:
        limit = "is required to continue with the same draws; the stream's first message has it"
        raise InvalidRequest.of("sampling.seed", limit)


def _eos_of(spec: GenerateSpec, loaded: Loaded) -> frozenset[int]:
    """Return the ids that end this text, less those that the model's head lacks."""
    if spec.ignore_eos:
        return frozenset()
    return frozenset(i for i in loaded.tokenizer.eos_ids if i < loaded.vocab_size)
