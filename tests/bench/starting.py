"""How fast a tree starts: its server until it listens, and loads of the demo model.

A first request is a part of a load here: what a worker imports as late as that is not forgotten.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import grpc

from mlxd.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc
from mlxd_shared.ops.measuring import Measures
from tests.bench.server import DEMO
from tests.support.served import serve

LOADS: Final = 3
"""Of each server; the least of them counts, because a machine adds to a start and never takes."""
STARTING: Final = ("listens_s", "load_s")


async def start_and_load(python: str, *, folder: Path = DEMO) -> Measures:
    """Start the server of the tree that `python` belongs to; return seconds, `STARTING`'s."""
    begun_s = time.perf_counter()
    async with serve("--model", f"bench={folder}", python=python) as server:
        listens_s = time.perf_counter() - begun_s
        async with grpc.aio.insecure_channel(server.address) as channel:
            load_s = min([await _load_once(channel) for _ in range(LOADS)])
    return {"listens_s": listens_s, "load_s": load_s}


async def _load_once(channel: grpc.aio.Channel) -> float:
    """Load the model, draw a token, unload it; return the seconds until the token."""
    models = model_pb2_grpc.ModelServiceStub(channel)
    inference = inference_pb2_grpc.InferenceServiceStub(channel)
    begun_s = time.perf_counter()
    async for _ in models.LoadModel(model_pb2.LoadModelRequest(model="bench")):
        pass
    request = inference_pb2.GenerateRequest(model="bench", text="Once", max_tokens=1)
    async for _ in inference.Generate(request):
        pass
    took_s = time.perf_counter() - begun_s
    await models.UnloadModel(model_pb2.UnloadModelRequest(model="bench"))
    return took_s
