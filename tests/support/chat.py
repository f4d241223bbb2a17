"""A chat of token prompts over a long system prompt, and what each of its turns cost."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mlxd.v1 import inference_pb2, inference_pb2_grpc, types_pb2, worker_pb2
from tests.support.tiny_model import VOCAB
from tests.support.worker_process import WorkerProcess

SYSTEM_TOKENS = 2000
USER_TOKENS = 60
ANSWER_TOKENS = 60
TURNS = 20
REEVALUATED_MAX = 64
"""Tokens that a turn may evaluate again, beside its new ones."""
NEAR_TIE = 1e-3
"""Of two logits: what rounding may decide."""
NEAR_TIES_MAX = 3
"""Turns of a chat that a near tie may break off; with random weights there is one now and then."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a chat and its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    cached: int
    first_token_s: float

    @property
    def evaluated(self) -> int:
        """Prompt tokens whose state was not reused."""
        return len(self.prompt) - self.cached


async def ask(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
    prompt: Sequence[int],
    *,
    max_tokens: int = ANSWER_TOKENS,
    bias: Mapping[int, float] = MappingProxyType({}),
) -> Turn:
    """Run one greedy request over a socket."""
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=prompt),
        sampling=types_pb2.SamplingOptions(temperature=0, logit_bias=dict(bias)),
        max_tokens=max_tokens,
        ignore_eos=True,
    )
    answer: list[int] = []
    first_s = 0.0
    begun_s = time.perf_counter()
    last: Any = None
    async for last in stub.Generate(request):
        if last.token_ids and not answer:
            first_s = time.perf_counter() - begun_s
        answer += last.token_ids
    usage = last.usage
    assert usage.prompt_tokens == len(prompt)
    return Turn(tuple(prompt), tuple(answer), usage.cached_tokens, first_s)


async def chat(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
    *,
    seed: int = 1,
    turns: int = TURNS,
    system_tokens: int = SYSTEM_TOKENS,
) -> list[Turn]:
    """Hold a chat: each prompt is all that was said before, and USER_TOKENS new tokens."""
    draws = random.Random(seed)
    said = _draw_ids(draws, system_tokens)
    done: list[Turn] = []
    for _ in range(turns):
        said += _draw_ids(draws, USER_TOKENS)
        done.append(await ask(stub, said))
        said += done[-1].answer
    return done


async def check_chat(worker: WorkerProcess, turns: Sequence[Turn]) -> None:
    """Assert what each turn may evaluate, and that a worker that forgot answers the same."""
    assert turns[0].cached == 0
    evaluated = [turn.evaluated for turn in turns[1:]]
    assert max(evaluated) <= USER_TOKENS + REEVALUATED_MAX, evaluated
    assert min(evaluated) >= USER_TOKENS, evaluated
    near_ties = [await check_same(worker, turn) for turn in turns]
    assert sum(near_ties) <= NEAR_TIES_MAX, near_ties


async def check_same(worker: WorkerProcess, turn: Turn) -> bool:
    """Assert that a worker that forgot answers the same; return whether a near tie broke it off.

    Sums of other chunks round otherwise. Where that decides, the two best tokens are so near that a
    bias of NEAR_TIE against either makes the other one the best; anything else is a wrong token.
    """
    await forget(worker)
    again = await ask(worker.inference, turn.prompt)
    assert again.cached == 0
    pairs = zip(turn.answer, again.answer, strict=True)
    place = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        return False
    begun = (*turn.prompt, *turn.answer[:place])
    one, other = turn.answer[place], again.answer[place]
    for worse, better in ((one, other), (other, one)):
        probe = await ask(worker.inference, begun, max_tokens=1, bias={worse: -NEAR_TIE})
        assert probe.answer == (better,), f"another answer after {place} tokens of {turn.answer}"
    return True


async def forget(worker: WorkerProcess) -> None:
    """Have the worker drop every prefix that it keeps."""
    await worker.control.Shrink(
        worker_pb2.ShrinkRequest(worker_incarnation=worker.incarnation, target_bytes=0)
    )


def _draw_ids(draws: random.Random, count: int) -> list[int]:
    return [draws.randrange(3, VOCAB) for _ in range(count)]
