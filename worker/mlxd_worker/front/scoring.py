"""How likely a model finds continuations: each is the end of a prompt, and a stream of its own.

Invariants:
- A text and its continuation are tokenised together; scoring begins at the first token that differs
  from the text alone, so that a token across both is scored whole.
- For a reranker the question about a document is rendered, and a continuation begins the answer:
  it is tokenised on its own.
- The streams are bounded and cancelled as `embedding` says. What the continuations of a text have
  in common is evaluated once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from mlxd_shared.domain.errors import InvalidRequest, NoChatTemplate
from mlxd_shared.domain.requests import Score, ScoreSpec
from mlxd_worker.chat.reranking import question_about
from mlxd_worker.engine.request import Finished, Tokens
from mlxd_worker.front.embedding import Reading, read_all
from mlxd_worker.front.prompting import check_ids, check_length
from mlxd_worker.front.worker import Worker
from mlxd_worker.thread.facts import Loaded


async def score(
    worker: Worker, spec: ScoreSpec, loaded: Loaded, *, left_s: float | None = None
) -> tuple[list[Score], int]:
    """Return each continuation's score, text by text, and how many tokens were evaluated for all.

    left_s: seconds until the deadline.

    Raises:
        InvalidRequest: a text does not fit the context, or no token precedes a continuation.
        NoChatTemplate, InvalidModel: the model's files have no usable form for a reranker.
        QueueFull: too many streams wait.
        MlxdError: whatever ended a continuation's stream.
    """
    deadline_s = None if left_s is None else time.monotonic() + left_s
    read = _prompts if spec.reranking is None else _answers
    prompts = [
        prompt
        for index in range(len(spec.texts))
        for prompt in await read(worker, spec, loaded, index)
    ]
    scores = await read_all(worker, loaded, prompts, _sum_up, deadline_s=deadline_s)
    return scores, sum(len(prompt.ids) for prompt in prompts)


async def _prompts(worker: Worker, spec: ScoreSpec, loaded: Loaded, index: int) -> list[Reading]:
    """Return the prompts of a text's continuations, checked against the context."""
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
            raise InvalidRequest.of(f"{place}.text", "no token precedes what is scored")
        prompts.append(Reading(ids, scored_from=begin))
    return prompts


async def _answers(worker: Worker, spec: ScoreSpec, loaded: Loaded, index: int) -> list[Reading]:
    """Return the question about a document, followed by each beginning of its answer."""
    assert spec.reranking is not None, "no reranker is asked"
    if loaded.chat is None:
        raise NoChatTemplate(loaded.job.name)
    scored, place = spec.texts[index], f"texts[{index}]"
    chars = len(scored.text) + len(spec.reranking.query) + len(spec.reranking.instruction)
    check_length(chars, loaded, field=f"{place}.text")
    chat = question_about(scored.text, spec.reranking, loaded.chat.template.text)
    try:
        question = (await worker.chats.render(loaded.chat, chat, worker.tokens)).ids
    except InvalidRequest as error:  # it names a field of the conversation
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
            raise InvalidRequest.of(field, "it has no tokens after those of the question")
        ids = check_ids(
            [*question, *answer], loaded, field=f"{place}.text", what="question about it"
        )
        prompts.append(Reading(ids, scored_from=len(question)))
    return prompts


def _count_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens in the common beginning of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))


def _sum_up(event: Tokens | Finished) -> Score:
    positions = event.prompt_logprobs
    return Score(
        math.fsum(position.chosen.logprob for position in positions),
        len(positions),
        all(position.top[0].token_id == position.chosen.token_id for position in positions),
    )
