"""Passes over one model's rows, and the logits of each: what two ways of computing must agree on.

Invariants:
- The same tokens, rows and order each time: what differs is the arithmetic alone.
- Long prompts and short ones, all rows together, and one alone: every kernel has its turn.
"""

from __future__ import annotations

import random
from typing import Final, cast

import mlx.core as mx

from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.stepping.choose import compile_steps
from mlxd_worker.models.base import Batch, Model, Passes
from mlxd_worker.proof.subjects import Subject

CONTEXT: Final = 512
LENGTHS: Final = (160, 37, 5)
"""Tokens of each row's prompt: the first one's exponentials are worth several lanes."""
ROWS_MAX: Final = 8
STEPS: Final = 4
"""Of all rows together; then as many of the first one alone."""


Walk = tuple[mx.array, ...]
"""Logits, float32 `[tokens, vocab]`, of each row's every token, by row."""


def texts_of(vocab: int, *, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Return each row's tokens: its prompt, and what it decodes."""
    draws = random.Random(73)  # noqa: S311 - no secret
    return [[draws.randrange(vocab) for _ in range(length + 2 * STEPS)] for length in lengths]


def step_through(subject: Subject) -> Walk:
    """Return the logits of prompts that are read in one pass each, then decoded token by token."""
    model = subject.make()
    texts = texts_of(model.vocab_size)
    caches = RowCaches(model.new_caches(), context_max=CONTEXT, rows_max=ROWS_MAX)
    passes: Passes = compile_steps(model, caches, subject.kind) or model
    rows = [RowId(10 + index) for index in range(len(texts))]
    parts: list[list[mx.array]] = []
    for row, text, length in zip(rows, texts, LENGTHS, strict=True):
        joined = caches.join(row, tokens=len(text), tokens_max=len(text))
        assert joined, "the table is empty"
        parts.append([_logits(passes, caches, Batch.prefill(text[:length], 0, row))])
    for step in range(2 * STEPS):
        going = range(len(rows)) if step < STEPS else range(1)
        offsets = [LENGTHS[index] + step for index in going]
        tokens = [texts[index][offset] for index, offset in zip(going, offsets, strict=True)]
        batch = Batch.decode(tokens, offsets, [rows[index] for index in going])
        logits = _logits(passes, caches, batch)
        for place, index in enumerate(going):
            parts[index].append(logits[place : place + 1])
    return tuple(mx.concatenate(own, axis=0) for own in parts)


def read_whole(subject: Subject) -> Walk:
    """Return the logits of the same tokens, each row read in one pass over caches of its own."""
    model = subject.make()
    texts = texts_of(model.vocab_size)
    whole = []
    for index, (text, length) in enumerate(zip(texts, LENGTHS, strict=True)):
        tokens = text if index == 0 else text[: length + STEPS]
        caches = RowCaches(model.new_caches(), context_max=CONTEXT, rows_max=1)
        caches.join(RowId(1), tokens=len(tokens))
        whole.append(_logits(model, caches, Batch.prefill(tokens, 0, RowId(1))))
    return tuple(whole)


def errors_between(ours: Walk, theirs: Walk) -> list[float]:
    """Return each token's largest difference as a part of its largest logit; NaN stays NaN."""
    errors: list[float] = []
    for left, right in zip(ours, theirs, strict=True):
        scale = mx.max(mx.abs(right), axis=-1)
        worst = mx.max(mx.abs(left - right), axis=-1) / mx.maximum(scale, 1e-6)
        errors += cast("list[float]", worst.tolist())
    return errors


def _logits(model: Model | Passes, caches: RowCaches, batch: Batch) -> mx.array:
    logits = model.logits(model.forward(batch, caches)).astype(mx.float32)
    mx.eval(logits, caches.state())
    return logits
