"""Writes down what transformers' own Qwen2.5-VL makes of the cases.

`python -m tests.support.qwen_vl_reference` needs PyTorch, on which the tests do not depend: run it
where that is installed beside the version of transformers that pyproject.toml names. Weights are
those of the tests' checkpoints; patches are those of transformers' own processor.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from tests.support.golden_logits import COLUMNS, write_golden
from tests.support.qwen_vl_cases import CASES, GOLDEN, PLACE, Case
from tests.support.seeing_shapes import shaped_settings

DIGITS = 7


def logits_of(case: Case, folder: Path) -> list[list[float]]:
    """Return the reference's logits of a case, of each position, in the columns that are kept."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    keys = {key: value for key, value in case.config.items() if key != "architectures"}
    config = transformers.Qwen2_5_VLConfig(**keys)
    config._attn_implementation = "eager"
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval().float()
    stored = load_file(str(case.write(folder) / "model.safetensors"))
    own = model.state_dict()
    for name, values in stored.items():
        own[name_in(name)].copy_(torch.from_numpy(values))
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


def patches_of(case: Case) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return all images' patches, one after another, and their grids."""
    module = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    processors: Any = importlib.import_module(module)
    settings = shaped_settings(case.side, merge=case.merge, temporal_patch_size=case.frames)
    del settings["image_processor_type"]
    processor = processors.Qwen2VLImageProcessorPil(**settings | {"do_resize": False})
    made = [processor(Image.fromarray(each), return_tensors="np") for each in case.pixels()]
    patches = [np.asarray(each["pixel_values"], dtype=np.float32) for each in made]
    grids = [np.asarray(each["image_grid_thw"], dtype=np.int64) for each in made]
    return np.concatenate(patches), np.concatenate(grids)


def name_in(name: str) -> str:
    """Return what the reference calls a tensor of the tests' checkpoints."""
    if name.startswith("vision_tower."):
        return name.replace("vision_tower.", "model.visual.", 1)
    return name.replace("model.", "model.language_model.", 1)


if __name__ == "__main__":
    write_golden(GOLDEN, CASES, logits_of)
