"""Requests of a real service, scaled to a machine of two cores.

From Azure's conversation trace of 2023: COUNT requests in a row, the same ones in every run, with a
quarter of their prompt and generated tokens, at least as many as make sense. Arrivals keep their
pattern; their rate is scaled by whoever sends them. The contents are random: the trace has none.
"""

from __future__ import annotations

import csv
import lzma
import random
from datetime import datetime
from functools import cache

from mlxd_controller.bench.requests import Request
from tests.bench.prompts import Prompts
from tests.real_inputs import real_input

TRACE = real_input("traces", "AzureLLMInferenceTrace_conv.csv.xz")
FIRST = 2000
COUNT = 96
SHRINK = 4
PROMPT_TOKENS = range(8, 4097)
NEW_TOKENS = range(2, 513)


@cache
def _rows() -> list[tuple[float, int, int]]:
    """Return arrival in seconds, prompt tokens and new tokens of the whole trace."""
    with lzma.open(TRACE, "rt", encoding="utf-8") as lines:
        return [
            (
                datetime.fromisoformat(f"{row['TIMESTAMP'][:26]}+00:00").timestamp(),
                int(row["ContextTokens"]),
                int(row["GeneratedTokens"]),
            )
            for row in csv.DictReader(lines)
        ]


def trace_requests(prompts: Prompts, _: random.Random) -> list[Request]:
    """Return a stretch of the trace, scaled in length; one request a second on average."""
    stretch = _rows()[FIRST : FIRST + COUNT]
    begin_s, end_s = stretch[0][0], stretch[-1][0]
    second = (end_s - begin_s) / COUNT
    requests = []
    for at_s, context, generated in stretch:
        prompt_tokens = _within(context // SHRINK, PROMPT_TOKENS)
        requests.append(
            Request(
                text=prompts.make(prompt_tokens),
                prompt_tokens=prompt_tokens,
                max_tokens=_within(generated // SHRINK, NEW_TOKENS),
                at_s=(at_s - begin_s) / second,
            )
        )
    return requests


def _within(value: int, bounds: range) -> int:
    return min(max(value, bounds[0]), bounds[-1])
