"""How likely a model finds continuations: each is the end of a prompt, and a stream of its own.

Invariants:
- A text and its continuation are read together; what is scored begins with the first token in which
  they differ from the text alone, so that a token across both is scored whole.
- A document that a reranker is asked about is rendered, and a continuation begins the answer: its
  tokens are its own.
- At most EMBED_STREAMS_MAX continuations of a request are with the engine at once, in turn with
  everybody else's streams. What the continuations of a text have in common is evaluated once.
- Whoever leaves has its streams cancelled.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, NoChatTemplate
from mlxd_shared.domain.requests import DEFAULTS, Score, ScoreSpec, resolve
from mlxd_worker.chat.reranking import question_about
from mlxd_worker.engine.request import PositionLogprobs, Submit
from mlxd_worker.front.prompting import check_ids, check_length
from mlxd_worker.front.worker import Worker
from mlxd_worker.thread.facts import Loaded


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of all continuations, and what was read for them."""

    scores: tuple[Score, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A text with a continuation, and the index of the first token that is scored."""

    ids: tuple[int, ...]
    begin: int


async def score(
    worker: Worker, spec: ScoreSpec, loaded: Loaded, *, left_s: float | None = None
) -> Scored:
    """Return each continuation's score, text by text.

    left_s: seconds until the deadline.

    Raises:
        InvalidRequest: a text that this model cannot read whole, or before which it has no token.
        NoChatTemplate, InvalidModel: a reranker is asked, which the model's files have no form for.
        QueueFull: too many streams wait.
        MlxdError: whatever ended a continuation's stream.
    """
    deadline_s = None if left_s is None else time.monotonic() + left_s
    turns = asyncio.Semaphore(config.EMBED_STREAMS_MAX)
    read = _prompts if spec.reranking is None else _answers
    prompts = [
        prompt
        for index in range(len(spec.texts))
        for prompt in await read(worker, spec, loaded, index)
    ]

    async def score_one(prompt: _Prompt) -> Score:
        request_id = uuid.uuid4().hex
        async with turns:
            with worker.streams.open(request_id, rows_max=loaded.rows_max) as stream:
                reader = worker.engine.reader()
                request = Submit(
                    stream=stream,
                    prompt=prompt.ids,
                    sampling=resolve(DEFAULTS, seed=0),
                    max_tokens=1,
                    stop=(),
                    stop_token_ids=frozenset(),
                    eos_ids=frozenset(),
                    skip_special_tokens=True,
                    submitted_s=time.monotonic(),
                    sink=reader,
                    request_id=request_id,
                    deadline_s=deadline_s,
                    prompt_logprobs=1,
                    scored_from=prompt.begin,
                )
                with worker.running(request, loaded):
                    event = await reader.next()
        return _sum_up(event.prompt_logprobs)

    tasks = [asyncio.create_task(score_one(prompt)) for prompt in prompts]
    try:
        scores = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Scored(tuple(scores), sum(len(prompt.ids) for prompt in prompts))


async def _prompts(worker: Worker, spec: ScoreSpec, loaded: Loaded, index: int) -> list[_Prompt]:
    """Return the prompts of a text's continuations, each of which the context holds."""
    scored, place = spec.texts[index], f"texts[{index}]"
    parse = bool(spec.parse_special_tokens)

    async def encode(text: str, field: str) -> Sequence[int]:
        check_length(len(text), loaded, field=field)
        return await worker.tokens.encode(
            loaded.tokenizer, text, field=field, kind="score", parse_special=parse
        )

    alone = await encode(scored.text, f"{place}.text")
    prompts = []
    for number, continuation in enumerate(scored.continuations):
        field = f"{place}.continuations[{number}]"
        whole = await encode(scored.text + continuation, field)
        ids = check_ids(whole, loaded, field=field, what="text with its continuation")
        begin = min(_count_common(alone, ids), len(ids) - 1)
        if begin < 1:
            raise InvalidRequest.of(f"{place}.text", "no token stands before what is scored")
        prompts.append(_Prompt(ids, begin))
    return prompts


async def _answers(worker: Worker, spec: ScoreSpec, loaded: Loaded, index: int) -> list[_Prompt]:
    """Return the question about a document, with each beginning of its answer."""
    assert spec.reranking is not None, "no reranker is asked"
    if loaded.chat is None:
        raise NoChatTemplate(loaded.job.name)
    scored, place = spec.texts[index], f"texts[{index}]"
    chars = len(scored.text) + len(spec.reranking.query) + len(spec.reranking.instruction)
    check_length(chars, loaded, field=f"{place}.text")
    chat = question_about(scored.text, spec.reranking, loaded.chat.template.text)
    try:
        question = (await worker.chats.render(loaded.chat, chat, worker.tokens)).ids
    except InvalidRequest as error:  # which names a field of the conversation
        problems = "; ".join(each.description for each in error.violations)
        raise InvalidRequest.of(f"{place}.text", f"the question about it: {problems}") from error
    prompts = []
    for number, continuation in enumerate(scored.continuations):
        field = f"{place}.continuations[{number}]"
        check_length(len(continuation), loaded, field=field)
        answer = await worker.tokens.encode(
            loaded.tokenizer, continuation, field=field, kind="score", begin_text=False
        )
        if not question or not answer:
            raise InvalidRequest.of(field, "it has no tokens behind those of the question")
        ids = check_ids(
            [*question, *answer], loaded, field=f"{place}.text", what="question about it"
        )
        prompts.append(_Prompt(ids, len(question)))
    return prompts


def _count_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))


def _sum_up(positions: Sequence[PositionLogprobs]) -> Score:
    return Score(
        math.fsum(position.chosen.logprob for position in positions),
        len(positions),
        all(position.top[0].token_id == position.chosen.token_id for position in positions),
    )
