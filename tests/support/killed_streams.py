"""Streams to kill the workers of, what their clients hear, and whether that is what it would be.

Invariants:
- A case is a function of its model; its whole run is one that nobody disturbs.
- Where a killed stream differs, the first token that does is judged: rounding may decide between
  two whose final scores are nearly equal (DESIGN 6), and nothing else may.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_shared.domain.requests import Sampling
from mlxd_worker.constraints.compiler import Constraints
from tests.support.near_ties import NEAR_TIE, Step, slack_of
from tests.support.probing import Probe
from tests.support.struck import NAME, Blow, Struck
from tests.support.trained import BEGINNING, Trained

TOKENS = 80
LATE = 0.88
"""Where in its text a stream has its stop string: after 65 of its 80 tokens."""
STOP_CHARS = 6
SCHEMA = {
    "type": "array",
    "items": {"type": "string", "maxLength": 24},
    "minItems": 40,
}
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
DRAWN = Sampling(
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    seed=1234,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    repeat_last_n=-1,
)
STOPPED = Sampling(temperature=0.8, top_k=0, top_p=0.9, min_p=0.0, seed=99)
FORMATTED = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)


@dataclass(frozen=True, slots=True)
class Case:
    """What one client asks for."""

    name: str
    prompt: tuple[int, ...]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    schema: str = ""

    def request(self, **fields: Any) -> inference_pb2.GenerateRequest:
        """Return the request, a new one each time."""
        options = asdict(self.sampling)
        del options["logit_bias"]  # none of the cases has any
        message = inference_pb2.GenerateRequest(
            model=NAME,
            tokens=inference_pb2.TokenIds(ids=self.prompt),
            sampling=types_pb2.SamplingOptions(**options),
            max_tokens=TOKENS,
            stop=self.stop,
            ignore_eos=not self.schema,
            **fields,
        )
        if self.schema:
            message.response_format.json_schema = self.schema
        return message


@dataclass(slots=True)
class Heard:
    """What a client heard of one stream."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    first: inference_pb2.GenerateResponse | None = None
    last: inference_pb2.GenerateResponse | None = None
    gap_s: float | None = None
    """From the blow to the first message after it; None where the stream was not struck."""

    @property
    def end(self) -> tuple[int, str]:
        """Why the stream ended."""
        assert self.last is not None
        return self.last.finish.reason, self.last.finish.stop_string


async def hear(
    struck: Struck, request: inference_pb2.GenerateRequest, *, blow: Blow | None = None
) -> Heard:
    """Return a whole stream; fails at a gap, a repeat or a second beginning."""
    outcome = Heard()
    async for message in struck.inference.Generate(request):
        assert message.offset == len(outcome.ids)
        assert bool(message.request_id) is (outcome.first is None)
        if blow is not None and message.offset >= blow.offset and outcome.gap_s is None:
            assert blow.fell.is_set()
            outcome.gap_s = time.monotonic() - blow.fell_s
        outcome.ids += message.token_ids
        outcome.text += message.text
        outcome.first = outcome.first or message
        outcome.last = message
    assert outcome.last is not None
    assert outcome.last.HasField("finish")
    return outcome


class Killed:
    """The cases of one model, their whole runs, and what was heard when their workers died."""

    def __init__(self, folder: Path, struck: Struck, **fields: Any) -> None:
        """Take a trained model and the controller that serves it; `fields` is in every request."""
        self._options = fields
        self._trained = Trained(folder)
        self._struck = struck
        self.cases: list[Case] = []
        self.whole: dict[str, Heard] = {}
        self.streams = 0
        self.ties: list[tuple[str, int, float]] = []
        """Case, position and slack of each stream that rounding made another."""
        self.gaps_s: list[float] = []

    async def begin(self, *names: str) -> None:
        """Make the cases of these names, or all, and run each of them undisturbed."""
        prompt = tuple(self._trained.tokenizer.encode(BEGINNING))
        plain = Case("stopped", prompt, STOPPED)
        text = (await hear(self._struck, plain.request(**self._options))).text
        all_cases = [
            Case("greedy", prompt, GREEDY),
            Case("drawn", prompt, DRAWN),
            Case("stopped", prompt, STOPPED, stop=_stops(text)),
            Case("schema", prompt, FORMATTED, schema=json.dumps(SCHEMA)),
        ]
        self.cases = [
            case for case in all_cases if case.name in (names or {c.name for c in all_cases})
        ]
        for case in self.cases:
            self.whole[case.name] = await hear(self._struck, case.request(**self._options))
            assert len(self.whole[case.name].ids) > 64, case.name

    async def kill(self, offset: int, cases: Sequence[Case], **options: Any) -> None:
        """Run these cases at once, kill their worker when each has `offset` tokens, and compare."""
        blow = self._struck.strike(offset, streams=len(cases), **options)
        outcomes = await asyncio.gather(
            *(hear(self._struck, case.request(**self._options), blow=blow) for case in cases)
        )
        assert blow.held == len(cases)
        for case, one in zip(cases, outcomes, strict=True):
            self.streams += 1
            assert one.gap_s is not None
            self.gaps_s.append(one.gap_s)
            assert one.last is not None
            assert one.last.usage.migrations == (1 if offset else 0)
            assert one.last.usage.completion_tokens == len(one.ids)
            self._compare(case, offset, one)

    def _compare(self, case: Case, offset: int, one: Heard) -> None:
        whole = self.whole[case.name]
        if one.ids != whole.ids:
            slack = self._slack(case, whole.ids, one.ids)
            assert slack < NEAR_TIE, (case.name, offset, slack)
            self.ties.append((case.name, offset, slack))
            return
        assert (one.text, one.end) == (whole.text, whole.end), (case.name, offset)

    def _slack(self, case: Case, one: Sequence[int], other: Sequence[int]) -> float:
        """Return how near the first draw that differs was to giving either token."""
        at = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        before = (*case.prompt, *one[:at])
        probe = Probe(self._trained.model)
        tiny = self._trained.engine(model=probe)
        tiny.submit(before, sampling=case.sampling, max_tokens=1, submitted_s=0.0)
        tiny.run()
        step = Step(
            probe.rows()[-1], case.sampling, at, before=before, mask=self._mask(case, one[:at])
        )
        return slack_of(step, (one[at], other[at]))

    def _mask(self, case: Case, before: Sequence[int]) -> bytes | None:
        if not case.schema:
            return None
        trained = self._trained
        constraints = Constraints(trained.tokenizer, trained.model.vocab_size)
        matcher = constraints.compile(ResponseFormat(FormatKind.JSON_SCHEMA, case.schema)).start()
        for token in before:
            matcher.accept(token)
        return bytes(matcher.mask())


def _stops(text: str) -> tuple[str, ...]:
    """Return a stop string that ends this text late, and others of which it has beginnings."""
    at = next(
        i
        for i in range(int(len(text) * LATE), len(text) - STOP_CHARS)
        if text.find(text[i : i + STOP_CHARS]) == i
    )
    return (text[at : at + STOP_CHARS], " the qqq", text[20:24] + "qqq")
