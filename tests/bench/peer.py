"""mlx-lm's stream_generate as a process: one JSON request a line in, one JSON timing a line out.

A process of its own, so that it can run with another BLAS than ours, or with ours, and so that
its timings contain nothing of the harness.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Serve requests from standard input until it closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blas", choices=["ours", "shipped"], required=True)
    parser.add_argument("--dtype", choices=["float32", "stored"], required=True)
    args = parser.parse_args()
    if args.blas == "ours":
        importlib.import_module("mlxd_worker.machine.blas").preload_blas()
    mx = importlib.import_module("mlx.core")
    mlx_lm = importlib.import_module("mlx_lm")
    model, tokenizer = mlx_lm.load(str(args.folder))
    if args.dtype == "float32":
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    tokenizer.eos_token_ids = set()
    print(json.dumps({"ready": True}), flush=True)  # noqa: T201 - the protocol
    for line in sys.stdin:
        request = json.loads(line)
        ids: list[int] = []
        stamps = [time.perf_counter()]
        for response in mlx_lm.stream_generate(
            model, tokenizer, request["prompt"], max_tokens=request["max_tokens"]
        ):
            ids.append(int(response.token))
            stamps.append(time.perf_counter())
        answer = {
            "prefill_s": stamps[1] - stamps[0],
            "decode_s": stamps[-1] - stamps[1],
            "ids": ids,
        }
        print(json.dumps(answer), flush=True)  # noqa: T201 - the protocol


if __name__ == "__main__":
    main()
