"""A model too large for any disk: real headers over a file of holes, and random values in memory.

Values come in blocks along the first axis, each by a key of its own, so that a rank that reads its
part has what one process that reads all has there.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import mlx.core as mx

import mlxd_shared
from mlxd_models.families.common.decoder import llama_tensors
from mlxd_models.families.llama import parse_llama
from mlxd_worker.models.weights.lazy_tensors import LazyTensors, Slab

BLOCKS = 8
SPREAD = 0.02
DEMO = Path(mlxd_shared.__file__).parent / "demo_model"


def write_model(folder: Path, config: dict[str, object]) -> int:
    """Write config, tokenizer and headers of such a model; return its weights' bytes."""
    folder.mkdir(parents=True)
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    place = 0
    for spec in llama_tensors(parse_llama(config)):
        if not spec.required:
            continue
        end = place + 2 * spec.values
        header[spec.name] = {"dtype": "BF16", "shape": spec.shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as weights:
        weights.write(len(text).to_bytes(8, "little") + text)
        weights.truncate(8 + len(text) + place)
    return place


def read_random() -> None:
    """Have this process read random values in place of holes, for as long as it runs."""

    def read(
        self: LazyTensors, slabs: Sequence[Slab], shape: Sequence[int], *, dtype: str
    ) -> mx.array:
        del dtype  # bfloat16, as stored
        parts = []
        for name, _ in slabs:
            fact, part = self._facts[name], self._parts.get(name)
            rows, columns = range(fact.shape[0]), slice(None)
            if part is not None and part.axis == 0:
                rows = part.span
            elif part is not None:
                columns = slice(part.span.start, part.span.stop)
            step = max(fact.shape[0] // BLOCKS, 1)
            for first in range(rows.start, rows.stop, step):
                key = mx.random.key(crc32(f"{name} {first}".encode()))
                values = mx.random.normal(
                    (step, *fact.shape[1:]), mx.bfloat16, scale=SPREAD, key=key
                )
                parts.append(1 + values if "norm" in name else values[..., columns])
            self._let_go(name)
        array = mx.concatenate(parts, axis=0).reshape(shape)
        mx.eval(array)
        return array

    LazyTensors.read = read  # type: ignore[method-assign]


def main() -> None:
    """Write the models `small`, `large` and `half` of three shapes into a folder."""
    from tests.bench.ranks import config_of  # noqa: PLC0415 - it starts this
    from tests.bench.ranks_machine import tell  # noqa: PLC0415

    folder, *shapes = sys.argv[1:]
    for name, shape in zip(("small", "large", "half"), shapes, strict=True):
        nbytes = write_model(Path(folder) / name, config_of(shape))
        tell(part="model", model=name, shape=shape, gb=round(nbytes / 1e9, 1))


if __name__ == "__main__":
    main()
