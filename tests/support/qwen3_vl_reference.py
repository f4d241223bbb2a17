"""Writes down what transformers' own Qwen3-VL and Qwen3.5 make of the cases.

`python -m tests.support.qwen3_vl_reference` needs PyTorch, on which the tests do not depend: run it
where that is installed beside the version of transformers that pyproject.toml names. Weights are
those of the tests' checkpoints; patches are those of transformers' own processor.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.support.golden_logits import COLUMNS, write_golden
from tests.support.qwen3_vl_cases import CASES, GOLDEN, StackedCase
from tests.support.qwen_vl_cases import PLACE
from tests.support.qwen_vl_reference import name_in, patches_of

DIGITS = 6
_STACK = ".mlp.switch_mlp."


def logits_of(case: StackedCase, folder: Path) -> list[list[float]]:
    """Return the reference's logits of a case, of each position, in the columns that are kept."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    keys = {key: value for key, value in case.config.items() if key != "architectures"}
    stem = case.architecture.removesuffix("ForConditionalGeneration")
    config = getattr(transformers, f"{stem}Config")(**keys)
    config._attn_implementation = "eager"
    model = getattr(transformers, case.architecture)(config).eval().float()
    stored = load_file(str(case.write(folder) / "model.safetensors"))
    own, left = model.state_dict(), {*model.state_dict()}
    for name, values in _fuse(stored).items():
        inner = name_in(name)
        own[inner].copy_(torch.from_numpy(values))
        left.remove(inner)
    left -= {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert not left, f"without weights: {left}"
    patches, grids = patches_of(case)
    prompt = torch.tensor([case.prompt])
    with torch.no_grad():
        output = model(
            input_ids=prompt,
            pixel_values=torch.from_numpy(patches),
            image_grid_thw=torch.from_numpy(grids),
            mm_token_type_ids=(prompt == PLACE).int(),
            attention_mask=torch.ones_like(prompt),
        )
    kept = output.logits[0][:, list(COLUMNS)].double().numpy()
    return [[float(f"{value:.{DIGITS}g}") for value in row] for row in kept]


def _fuse(stored: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return tensors as the reference has them: gates and ups of all experts are one."""
    tensors = {name: values for name, values in stored.items() if _STACK not in name}
    for name, values in stored.items():
        layer, stack, linear = name.partition(_STACK)
        if stack and linear == "gate_proj.weight":
            ups = stored[f"{layer}{_STACK}up_proj.weight"]
            tensors[f"{layer}.mlp.experts.gate_up_proj"] = np.concatenate([values, ups], axis=1)
        elif stack and linear == "down_proj.weight":
            tensors[f"{layer}.mlp.experts.down_proj"] = values
    return tensors


if __name__ == "__main__":
    write_golden(GOLDEN, CASES, logits_of)
