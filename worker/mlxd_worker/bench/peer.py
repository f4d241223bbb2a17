"""mlx-lm's stream_generate as a process: one JSON request a line in, one JSON answer a line out.

A request is `{"prompts": [IDS], "max_tokens": N}`, whose prompts are taken one after another; the
answer `{"outcomes": [...], "peak_nbytes": N}`.

A process of its own, so that it can run with another BLAS than ours, or with ours, and so that
its timings contain nothing of the harness.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from mlxd_shared.ops.measuring import Outcome


def main() -> None:
    """Serve requests from standard input until it closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blas", choices=["ours", "shipped"], required=True)
    parser.add_argument("--dtype", choices=["float32", "stored"], required=True)
    args = parser.parse_args()
    if args.blas == "ours":
        # The same OpenBLAS, without our kernels in front.
        alone = {**os.environ, "MLXD_PRODUCTS": "off"}
        importlib.import_module("mlxd_worker.machine.blas").preload_blas(alone)
    mx = importlib.import_module("mlx.core")
    mlx_lm = importlib.import_module("mlx_lm")
    model, tokenizer = mlx_lm.load(str(args.folder))
    if args.dtype == "float32":
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    tokenizer.eos_token_ids = set()
    say(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        mx.reset_peak_memory()
        outcomes = []
        for prompt in request["prompts"]:
            sent_s = time.perf_counter()
            stream = mlx_lm.stream_generate(
                model, tokenizer, prompt, max_tokens=request["max_tokens"]
            )
            stamps_s = tuple([time.perf_counter() for _ in stream])
            outcomes.append(asdict(Outcome(sent_s, stamps_s, (1,) * len(stamps_s), "")))
        say(outcomes=outcomes, peak_nbytes=mx.get_peak_memory())


def say(**answer: object) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
