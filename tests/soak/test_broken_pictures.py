"""500 files that are no pictures, sent to a served model while others ask it: each is refused.

`python -m pytest -m soak tests/soak/test_broken_pictures.py -s` prints the gaps of docs/evidence.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlxd import Client, Delta, SamplingOptions
from tests.bench.models import Shape
from tests.support.made_weights import write_weights
from tests.support.random_model import decoder_config
from tests.support.seeing import add_place, image_settings, seeing_config
from tests.support.seeing_models import SEEING
from tests.support.served import serve
from tests.support.tiny_model import write_json

NAME = "m"
FILES = 500
AT_ONCE = 4
LISTENED = 400
"""Tokens of each stream that is listened to."""
LISTENED_LARGE = 40
QUIET_STREAMS = 12
LARGE = Shape(hidden=1024, layers=24, heads=16, kv_heads=8, mlp=4096, context=4096)
"""Of a text of 380 million values, whose step takes as long as those of small models that see."""
FIELD = "chat.messages[0].parts[0]."
SENDER = ("-m", "tests.support.refused_sender")


def write_large_model(folder: Path) -> Path:
    """Write a LLaVA with a text of this shape; return `folder`."""
    config = seeing_config(tower="clip")
    config["text_config"] |= decoder_config("LlamaForCausalLM", LARGE, model_type="llama")
    side = config["vision_config"]["image_size"]
    write_weights(folder, config, stored="bfloat16")
    add_place(folder)
    write_json(folder / "preprocessor_config.json", image_settings(side, tower="clip"))
    return folder


MODELS = {**SEEING, "llava-large": write_large_model}


async def listen(client: Client, gaps_s: list[float], *, tokens: int) -> None:
    """Hear one stream of text to its end; add the gaps between its messages."""
    sampling = SamplingOptions(temperature=1.0, seed=3)
    before_s, heard = 0.0, 0
    async with client.generate(
        "Once upon a time", model=NAME, sampling=sampling, max_tokens=tokens, ignore_eos=True
    ) as stream:
        async for event in stream:
            heard += len(event.token_ids) if isinstance(event, Delta) else 0
            now_s = time.monotonic()
            if before_s:
                gaps_s.append(now_s - before_s)
            before_s = now_s
    assert heard == tokens


async def send_files(address: str) -> list[tuple[str, str]]:
    """Send the files from a process of its own; return each refusal's field and sentence."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *SENDER, address, NAME, str(FILES), str(AT_ONCE)),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return [(field, description) for field, description in json.loads(out)]


def describe_gaps(moment: str, gaps_s: Sequence[float]) -> str:
    """Return a row of the table: gaps in milliseconds."""
    ordered = sorted(gaps_s)
    at = (ordered[len(ordered) * share // 1000] * 1e3 for share in (500, 990, 999))
    shown = ", ".join(f"{value:.2f}" for value in at)
    return (
        f"{moment}: {len(ordered)} gaps, p50, p99, p99.9 {shown}, most {ordered[-1] * 1e3:.2f} ms"
    )


async def worker_of(client: Client) -> str:
    """Return which worker serves the model."""
    (model,) = await client.models()
    return model.worker_incarnation


@pytest.mark.asyncio
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
async def test_no_file_holds_others_up(name: str, tmp_path: Path) -> None:
    """A refusal of the file's own field for each; the gaps of a stream beside them are printed,
    with its gaps before. They are not judged: on a busy machine they say nothing of us."""
    folder = MODELS[name](tmp_path / name)
    tokens = LISTENED_LARGE if name == "llava-large" else LISTENED
    quiet_s: list[float] = []
    beside_s: list[float] = []
    async with serve("--model", f"{NAME}={folder}") as server, Client(server.address) as client:
        for _ in range(QUIET_STREAMS):
            await listen(client, quiet_s, tokens=tokens)
        worker = await worker_of(client)
        sending = asyncio.create_task(send_files(server.address))
        while not sending.done():
            await listen(client, beside_s, tokens=tokens)
        refusals = await sending
        await listen(client, quiet_s, tokens=tokens)
        assert await worker_of(client) == worker, "the worker is still the same"
    assert len(refusals) == FILES
    assert all(field.startswith(FIELD) and description for field, description in refusals)
    for moment, gaps_s in (("undisturbed", quiet_s), (f"beside {FILES} files", beside_s)):
        sys.stderr.write(f"\n{name}, {describe_gaps(moment, gaps_s)}")
    sys.stderr.write("\n")
