"""One stream from its specification to its events: check, tokenise off the loop, submit, read.

Invariants:
- Everything that the model decides about a request is decided here, before the engine sees it.
- The engine hears of the stream's end from here however it ends: by itself, by its client, by a
  deadline, or by a fault.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from mlxd_shared.errors import InvalidRequest, ModelUnloaded
from mlxd_shared.requests import GenerateSpec, check_vocabulary, merge, resolve
from mlxd_worker.engine.constraint import Constraint
from mlxd_worker.engine.request import Cancel, Finished, Sink, StreamId, Submit, Tokens
from mlxd_worker.facts import Loaded
from mlxd_worker.worker import Worker

NORMALISED_CHARS_MAX = 4
"""Characters that a tokenizer may make one of before it splits a text: a letter and its accents."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one message of a stream says."""

    request_id: str
    model_digest: str
    event: Tokens | Finished
    seed: int | None
    """The seed in force, on the first message only."""


async def generate(
    worker: Worker, spec: GenerateSpec, loaded: Loaded, *, left_s: float | None = None
) -> AsyncGenerator[Part, None]:
    """Yield one stream's events, joined where the reader is slow, the first token alone.

    left_s: after so many seconds nobody wants it any more; None: it may take as long as it takes.

    Raises:
        InvalidRequest: something this model cannot honour; names the field and the limit.
        DuplicateRequest: the request id is in flight.
        QueueFull: too many streams wait.
        DeadlinePassed: `left_s` have passed; gRPC ends the call then, too, sooner or later.
        MlxdError: whatever ended the stream.
    """
    accepted_s = time.monotonic()
    check_vocabulary(spec, loaded.vocab_size)
    request_id = spec.request_id or uuid.uuid4().hex
    with worker.streams.open(request_id, rows_max=loaded.rows_max) as stream:
        prompt = await _prompt_tokens(spec, loaded)
        _check_resumed(spec, loaded, prompt)
        constraint = await _constraint(worker, spec, loaded)
        if worker.loaded is not loaded:
            raise ModelUnloaded(loaded.job.name)
        reader = worker.engine.reader()
        by_steps = len(spec.resumed) <= worker.replay_steps_max
        request = replace(
            _submit(stream, spec, loaded, prompt, sink=reader, accepted_s=accepted_s),
            request_id=request_id,
            priority=spec.priority,
            deadline_s=None if left_s is None else accepted_s + left_s,
            constraint=constraint,
            prompt=prompt if by_steps else prompt + spec.resumed,
            resumed=0 if by_steps else len(spec.resumed),
            forced=spec.resumed if by_steps else (),
        )
        worker.engine.submit(request)
        seed: int | None = request.sampling.seed
        ended = False
        try:
            while not ended:
                event = await reader.next()
                ended = isinstance(event, Finished)
                yield Part(request_id, loaded.job.digest, event, seed)
                seed = None
        finally:
            if not ended:
                worker.engine.cancel(Cancel(stream))


async def _constraint(worker: Worker, spec: GenerateSpec, loaded: Loaded) -> Constraint | None:
    """Return what complete output must match, compiled; None where it may be anything."""
    if spec.response_format is None:
        return None
    return await worker.formats.compiled(loaded.constraints, spec.response_format)


async def _prompt_tokens(spec: GenerateSpec, loaded: Loaded) -> tuple[int, ...]:
    """Return the prompt's ids, at least one and fewer than the context holds."""
    if isinstance(spec.prompt, str):
        field = "text"
        _check_length(spec.prompt, loaded)
        prompt = tuple(await asyncio.to_thread(loaded.tokenizer.encode, spec.prompt))
    else:
        field, prompt = "tokens", spec.prompt
    if not prompt:
        raise InvalidRequest.of(field, "the prompt has no tokens; at least one is needed")
    if len(prompt) >= loaded.context_length:
        limit = (
            f"the prompt has {len(prompt)} tokens; the context of {loaded.context_length} "
            f"takes at most {loaded.context_length - 1}"
        )
        raise InvalidRequest.of(field, limit)
    if len(prompt) + spec.min_tokens > loaded.context_length:
        limit = (
            f"{spec.min_tokens} is above the {loaded.context_length - len(prompt)} tokens that the "
            f"context of {loaded.context_length} has left behind the prompt"
        )
        raise InvalidRequest.of("min_tokens", limit)
    if max(prompt) >= loaded.vocab_size:  # a text's: MLX would read beyond the embedding, unasked
        limit = (
            f"the tokenizer makes it token {max(prompt)}, which the model does not have; "
            f"its vocabulary has {loaded.vocab_size} tokens"
        )
        raise InvalidRequest.of(field, limit)
    return prompt


def _check_resumed(spec: GenerateSpec, loaded: Loaded, prompt: tuple[int, ...]) -> None:
    """Refuse to go on from tokens that this request cannot have brought forth."""
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
        limit = "to go on with the same draws a stream needs its seed, which its first message told"
        raise InvalidRequest.of("sampling.seed", limit)


def _check_length(text: str, loaded: Loaded) -> None:
    """Refuse a text that the context could not hold if every token were the longest there is.

    To tokenise it first could take a minute, and memory for every one of its tokens.
    """
    chars_max = loaded.context_length * loaded.tokenizer.piece_chars_max * NORMALISED_CHARS_MAX
    if len(text) > chars_max:
        limit = (
            f"the prompt has {len(text)} characters; the context of {loaded.context_length} "
            f"tokens takes at most {chars_max}"
        )
        raise InvalidRequest.of("text", limit)


def _submit(
    stream: StreamId,
    spec: GenerateSpec,
    loaded: Loaded,
    prompt: tuple[int, ...],
    *,
    sink: Sink,
    accepted_s: float,
) -> Submit:
    return Submit(
        stream=stream,
        prompt=prompt,
        sampling=resolve(
            merge(spec.sampling, loaded.sampling), seed=int.from_bytes(os.urandom(8), "little")
        ),
        max_tokens=spec.max_tokens,
        stop=spec.stop,
        stop_token_ids=frozenset(spec.stop_token_ids),
        eos_ids=_eos_of(spec, loaded),
        skip_special_tokens=spec.skip_special_tokens,
        submitted_s=accepted_s,
        sink=sink,
        min_tokens=spec.min_tokens,
        top_logprobs=spec.top_logprobs,
        speculation_depth=spec.speculation_depth,
    )


def _eos_of(spec: GenerateSpec, loaded: Loaded) -> frozenset[int]:
    """Return the ids that end this text, less those that the model's head does not have."""
    if spec.ignore_eos:
        return frozenset()
    return frozenset(i for i in loaded.tokenizer.eos_ids if i < loaded.vocab_size)
