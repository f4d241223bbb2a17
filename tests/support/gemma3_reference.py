"""Writes down what transformers' own Gemma 3 makes of the cases.

`python -m tests.support.gemma3_reference` needs PyTorch, on which the tests do not depend: run it
where that is installed beside the version of transformers that pyproject.toml names. Weights are
those of the tests' checkpoints.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.support.gemma3_cases import CASES, GOLDEN, PLACE, Case
from tests.support.golden_logits import COLUMNS, write_golden

DIGITS = 7


def logits_of(case: Case, folder: Path) -> list[list[float]]:
    """Return the reference's logits of a case, of each position, in the columns that are kept."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    keys = {key: value for key, value in case.config.items() if key != "architectures"}
    config = transformers.Gemma3Config(**keys)
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config).eval().float()
    stored = load_file(str(case.write(folder) / "model.safetensors"))
    own = model.state_dict()
    for name, values in stored.items():
        own[_name_in(own, name)].copy_(torch.from_numpy(values))
    prompt = torch.tensor([case.prompt])
    shown = (case.pixels()[: case.shown].astype(np.float32) / 255 - 0.5) / 0.5
    pixels = torch.from_numpy(shown.transpose(0, 3, 1, 2).copy()) if case.shown else None
    with torch.no_grad():
        output = model(
            input_ids=prompt,
            pixel_values=pixels,
            token_type_ids=(prompt == PLACE).int(),
            attention_mask=torch.ones_like(prompt),
        )
    kept = output.logits[0][:, list(COLUMNS)].double().numpy()
    return [[float(f"{value:.{DIGITS}g}") for value in row] for row in kept]


def _name_in(own: Any, name: str) -> str:
    """Return what the reference calls a tensor of the tests' checkpoints."""
    candidates = (
        name.replace("model.", "model.language_model.", 1),
        name.replace("vision_tower.", "model.vision_tower.vision_model.", 1),
        name.replace("vision_tower.", "model.vision_tower.", 1),
        f"model.{name}",
    )
    return next(each for each in candidates if each in own)


if __name__ == "__main__":
    write_golden(GOLDEN, CASES, logits_of)
