"""A real trained model: the golden continuations, and mlx-lm's own, token for token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_peer

from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch, Model
from tests.real_inputs import real_input
from tests.support.effort import IN_FULL
from tests.worker.tiny import (
    caches_of,
    difference,
    floats,
    forced_logits,
    ints,
    load,
)

DEMO = Path(__file__).parents[3] / "shared" / "mlxd_shared" / "demo_model"
NEAR_TIE = 1e-4
PROMPTS = 20
NEW_TOKENS = 200 if IN_FULL else 80
ROW = RowId(1)


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder of the real model."""
    return real_input("models", "stories260k")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    """The real model, loaded."""
    return load(folder)


def start(model: Model, caches: RowCaches, row: RowId, prompt: Sequence[int]) -> int:
    """Prefill a new row; return its first greedy token."""
    caches.join(row, tokens=len(prompt))
    hidden = model.forward(Batch.prefill(prompt, 0, row), caches)
    first = mx.argmax(model.logits(hidden[-1:]), axis=-1)
    mx.eval(first, caches.state())
    return ints(first)[0]


def greedy_together(model: Model, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return `count` greedy tokens for each prompt, one joining the batch every third step."""
    caches = caches_of(model, rows_max=len(prompts))
    outputs: list[list[int]] = [[] for _ in prompts]
    step = 0
    while any(len(output) < count for output in outputs):
        if step % 3 == 0 and step // 3 < len(prompts):
            index = step // 3
            outputs[index].append(start(model, caches, RowId(index), prompts[index]))
        step += 1
        running = [row for row in caches.rows if len(outputs[row]) < count]
        ended = [row for row in caches.rows if len(outputs[row]) >= count]
        for row in ended:
            caches.leave(row)
        if not running:
            continue
        offsets = [len(prompts[row]) + len(outputs[row]) - 1 for row in running]
        for row, offset in zip(running, offsets, strict=True):
            caches.reserve(row, tokens=offset + 1)
        batch = Batch.decode([outputs[row][-1] for row in running], offsets, running)
        best = mx.argmax(model.logits(model.forward(batch, caches)), axis=-1)
        mx.eval(best, caches.state())
        for row, token in zip(running, ints(best), strict=True):
            outputs[row].append(token)
    for row in caches.rows:
        caches.leave(row)
    assert caches.nbytes == 0
    return outputs


def peer_prompts(folder: Path) -> list[list[int]]:
    """Return prompts of various lengths, cut from what the model itself would write."""
    cases = json.loads((folder.parent / "golden_greedy.json").read_text())["stories260k"]
    texts = [case["prompt_ids"] + case["greedy_ids"] for case in cases]
    return [
        [1, *text[5 + 3 * number : 8 + 3 * number + 7 * (number % 4)]]
        for text in texts
        for number in range(PROMPTS // len(texts))
    ]


def test_golden_continuations(folder: Path, model: Model) -> None:
    """The continuations that an independent reference computed are reproduced, token for token."""
    cases = json.loads((folder.parent / "golden_greedy.json").read_text())["stories260k"]
    prompts = [case["prompt_ids"] for case in cases]
    count = min(len(case["greedy_ids"]) for case in cases)

    outputs = greedy_together(model, prompts, count)

    assert outputs == [case["greedy_ids"][:count] for case in cases]


def test_greedy_equals_the_peers(folder: Path, model: Model) -> None:
    """Ragged batches write what mlx-lm writes row by row, up to its first near-tie."""
    prompts = peer_prompts(folder)
    outputs = greedy_together(model, prompts, NEW_TOKENS)
    peer, _ = load_peer(folder)

    compared = 0
    ties: list[str] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        # Forcing our own tokens through the peer judges every position, not only the first ones.
        logits = peer(mx.array([prompt + output[:-1]]), cache=make_prompt_cache(peer))[0]
        best = mx.sort(logits[len(prompt) - 1 :], axis=-1)[:, -2:]
        chosen = ints(mx.argmax(logits[len(prompt) - 1 :], axis=-1))
        margins = floats(best[:, 1] - best[:, 0])
        for position, (ours, theirs, margin) in enumerate(
            zip(output, chosen, margins, strict=True)
        ):
            if ours != theirs:
                ties.append(f"near-tie at {position}: {ours} and {theirs}, margin {margin:.2e}")
                assert margin < NEAR_TIE, ties[-1]
            compared += 1
    print(f"{compared} tokens, {len(ties)} near-ties", *ties, sep="\n")  # noqa: T201 - asked for
    assert compared == len(prompts) * NEW_TOKENS


def test_the_demo_models_logits_equal_the_peers() -> None:
    """The demo model, widened from bfloat16 on both sides, has mlx-lm's logits within 1e-3."""
    peer, _ = load_peer(DEMO)
    peer.set_dtype(mx.float32)
    model = load(DEMO)
    text = ints(mx.random.randint(0, model.vocab_size, (400,), key=mx.random.key(1)))
    expected = peer(mx.array([text]), cache=make_prompt_cache(peer))[0]

    logits = forced_logits(model, caches_of(model), ROW, text, cuts=[*range(1, 60), 200, 300])

    assert difference(logits, expected) < 1e-3


def test_teacher_forced_logits_equal_the_peers(folder: Path, model: Model) -> None:
    """On the real weights logits stay within 1e-3 of mlx-lm's over the whole context."""
    text = greedy_together(model, peer_prompts(folder)[:1], 400)[0]
    peer, _ = load_peer(folder)
    expected = peer(mx.array([text]), cache=make_prompt_cache(peer))[0]

    logits = forced_logits(model, caches_of(model), ROW, text, cuts=[*range(1, 60), 200, 300])

    assert difference(logits, expected) < 1e-3
