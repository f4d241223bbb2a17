"""`python -m tests.bench.door`: what a worker spends on a request before its model is asked.

CPU time from the bytes to the checked value, with a controller's word for the request and without,
in turn; medians. One JSON object a case goes to standard output.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator

from mlxd.v1 import inference_pb2
from mlxd_shared.wire.convert import generate_from_pb
from mlxd_shared.wire.intake import Intake, Reader, is_checked, run_paced
from mlxd_shared.wire.wire_scan import RELAYED, Size
from tests.bench.report import json_line

ROUNDS = 15
ROUND_S = 0.1
TOOL = json.dumps({
    "type": "function",
    "function": {
        "name": "look_up", "description": "Look a word up. " * 20,
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
})  # fmt: skip


def cases() -> Iterator[tuple[str, inference_pb2.GenerateRequest]]:
    """Yield requests as clients send them, by name."""
    request = inference_pb2.GenerateRequest(model="d" * 64, request_id="r" * 32, max_tokens=64)
    request.sampling.temperature = 0.7

    def make(**prompt: object) -> inference_pb2.GenerateRequest:
        other = inference_pb2.GenerateRequest(**prompt)  # type: ignore[arg-type]
        other.MergeFrom(request)
        return other

    def chat(messages: int, chars: int, tools: int) -> inference_pb2.ChatPrompt:
        roles = ["user", "assistant"] * messages
        turns = [
            inference_pb2.ChatMessage(role=role, content="a" * chars) for role in roles[:messages]
        ]
        return inference_pb2.ChatPrompt(messages=turns, tools_json=[TOOL] * tools)

    yield "text of 100 characters", make(text="a" * 100)
    yield "chat of 3 messages", make(chat=chat(3, 100, 0))
    yield "chat of 3 messages, 10 tools", make(chat=chat(3, 100, 10))
    yield "chat of 1,000 messages", make(chat=chat(1000, 200, 0))
    yield "chat of 1,000 messages, 100 tools", make(chat=chat(1000, 200, 100))
    yield "1 Mi ids", make(tokens=inference_pb2.TokenIds(ids=range(1 << 20)))
    yield "text of 8 Mi characters", make(text="a" * (8 << 20))


async def spend(
    intake: Intake, reader: Reader[inference_pb2.GenerateRequest], raw: bytes, counted: Size | None
) -> float:
    """Return the CPU seconds of this process that one request takes, over some of them."""
    times, began_s = 0, time.process_time()
    while (spent_s := time.process_time() - began_s) < ROUND_S:
        async with intake.take(raw, reader, counted=counted) as request:
            await run_paced(generate_from_pb, request, is_checked=is_checked())
        times += 1
    return spent_s / times


async def main() -> None:
    """Measure every case."""
    intake = Intake(RELAYED, trim=lambda: None)
    reader = Reader(inference_pb2.GenerateRequest, RELAYED)
    for name, request in cases():
        raw = request.SerializeToString()
        size = reader.size(raw)
        times: dict[Size | None, list[float]] = {None: [], size: []}
        for _ in range(ROUNDS):
            for counted, spent in times.items():
                spent.append(await spend(intake, reader, raw, counted))
        checks, takes_word = (1e6 * statistics.median(spent) for spent in times.values())
        line = {"nbytes": len(raw), "checks_us": round(checks), "takes_word_us": round(takes_word)}
        sys.stdout.write(json_line("door", case=name, **line) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
