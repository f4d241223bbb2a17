"""Small random models of mlx-vlm's that see, on disk, and mlx-vlm's own logits of whole prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mlxd_models.sizes.vlm_types import VLM_TYPES
from mlxd_worker.cache.base import RowId
from mlxd_worker.engine.request import Image
from mlxd_worker.models.base import Batch, Model
from mlxd_worker.models.vlm.peer import hollow_seeing, restore_seeing, vlm_module
from mlxd_worker.models.zoo.peer import parameters_of, without_compiling
from tests.support.seeing import PLACE as PLACE_TEXT
from tests.support.seeing import TEMPLATE
from tests.support.seeing_shapes import PLACES_MAX
from tests.support.shown import Shown, read, shown_by
from tests.support.tiny_model import write_json, write_text_files
from tests.worker.hybrid import error
from tests.worker.tiny import caches_of, write_model
from tests.worker.vlm_configs import CONFIGS, END, PLACE, START

GRIDS: Final = ((3, 5), (2, 2), (4, 2))
"""Rows and columns of places of three images."""
PIECES: Final = ((7, 41, 8), (30,), (33, 12), (20, 50, 61))
"""The text around them."""
TEXT: Final = (9, 8, 7, 3, 55, 2, 80, 61, 11, 40)
"""A prompt that shows nothing."""
STEPS: Final = 3
"""How many of a prompt's last tokens are decoded one by one."""
SPREAD: Final = 1.0
"""How far logits deviate from each other at least, so that there is something to compare."""


@dataclass(frozen=True, slots=True)
class Case:
    """A type's configuration with other sizes or parts."""

    kind: str
    name: str = "plain"
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        config = CONFIGS[self.kind]
        vision = {**config["vision_config"], **self.vision}
        if "text_config" in config:
            return {
                **config, "text_config": {**config["text_config"], **self.text},
                "vision_config": vision,
            }  # fmt: skip
        return {**config, **self.text, "vision_config": vision}

    @property
    def side(self) -> int:
        """Of a place, in pixels."""
        vision = self.config["vision_config"]
        return int(vision["patch_size"] * vision["spatial_merge_size"])

    @property
    def prompt(self) -> tuple[int, ...]:
        """Text, an image, text, an image, text, an image, text."""
        ids = list(PIECES[0])
        for (rows, columns), piece in zip(GRIDS, PIECES[1:], strict=True):
            ids += [START, *[PLACE] * (rows * columns), END, *piece]
        return tuple(ids)

    @property
    def images(self) -> tuple[Image, ...]:
        """The images at their places."""
        images, at = [], len(PIECES[0]) + 1
        for number, (rows, columns) in enumerate(GRIDS):
            images.append(Image(bytes([number]), at, rows * columns, b"", (rows, columns)))
            at += rows * columns + len(PIECES[number + 1]) + 2
        return tuple(images)

    def pixels(self) -> list[np.ndarray[Any, Any]]:
        """Return the images, uint8 [height, width, 3] each."""
        draws = np.random.Generator(np.random.PCG64(9))
        return [
            draws.integers(0, 256, (rows * self.side, columns * self.side, 3), dtype=np.uint8)
            for rows, columns in GRIDS
        ]

    def write(self, folder: Path, *, lively: bool = False) -> Path:
        """Write a model; return its folder.

        lively: its logits deviate by `SPREAD` at least.
        """
        weights = vlm_weights(self.config)
        write_model(folder, self.config, stored_layouts(weights))
        write_json(folder / "preprocessor_config.json", self.settings)
        if not lively:
            return folder
        spread = cast("float", mx.std(Peer(self, folder).logits()).item())
        if spread < 2 * SPREAD:
            head = next((name for name in weights if name.endswith("lm_head.weight")), None)
            head = head or next(name for name in weights if name.endswith("embed_tokens.weight"))
            weights[head] = weights[head] * (2 * SPREAD / spread)
            write_model(folder, self.config, stored_layouts(weights))
        return folder

    @property
    def settings(self) -> dict[str, Any]:
        """Its preprocessor_config.json."""
        return settings_of(self.config)


def _several(kind: str, **variants: Mapping[str, Mapping[str, Any]]) -> tuple[Case, ...]:
    more = [Case(kind, name, **changes) for name, changes in variants.items()]
    return (Case(kind), *more)


def _kinds() -> tuple[Case, ...]:
    """Return five configurations of each type: other patches, layers, heads, parts."""
    deep, wide = {"vision": {"depth": 3}}, {"vision": {"patch_size": 6}}
    layered = {"vision": {"num_hidden_layers": 3}}
    one = {"text": {"num_key_value_heads": 1}}
    tied = {"text": {"tie_word_embeddings": True}}
    glm_heads = {"vision": {"num_heads": 4, "intermediate_size": 40}}
    return (
        *_several(
            "qwen2_vl",
            wide={"vision": {"patch_size": 6, "spatial_patch_size": 6}},
            frames={"vision": {"temporal_patch_size": 3}},
            tied=tied,
            axes={
                "text": {
                    "num_key_value_heads": 4,
                    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
                },
                "vision": {"num_heads": 4, "mlp_ratio": 3},
            },
        ),
        *_several(
            "dots_ocr", wide=wide, layered=layered, tied=tied,
            bare={
                "text": {"attention_bias": False, **one["text"]},
                "vision": {"post_norm": False, "use_bias": True},
            },
        ),
        *_several(
            "mage_vl", wide=wide, layered=layered, tied=tied,
            rms={"text": one["text"], "vision": {"layer_norm_type": "rms_norm", "use_head": False,
                 "use_patch_position_encoding": True}},
        ),
        *_several("glm4v", wide=wide, deep=deep, one=one, heads=glm_heads),
        *_several(
            "glm4v_moe", wide=wide, deep=deep, one=one,
            groups={"text": {"n_group": 2, "topk_group": 1, "n_routed_experts": 8,
                             "routed_scaling_factor": 1.5, "use_qk_norm": False}},
        ),
        *_several(
            "glm_ocr", wide=wide, deep=deep, one=one,
            heads={"text": {"head_dim": 8, "rope_parameters": {
                "rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 500,
                "partial_rotary_factor": 1.0,
            }}, **glm_heads},
        ),
        *_several(
            "paddleocr_vl", wide=wide, layered=layered, biased={"text": {"use_bias": True}},
            axes={"text": {**one["text"], "rope_scaling": {
                "type": "default", "rope_type": "default", "mrope_section": [2, 3, 3],
            }}},
        ),
    )  # fmt: skip


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a config's images are made ready: 4 to `PLACES_MAX` places of them."""
    vision, kind = config["vision_config"], str(config["model_type"])
    patch, merge = vision["patch_size"], vision["spatial_merge_size"]
    square = (patch * merge) ** 2
    glm = kind.startswith("glm")
    named = {"paddleocr_vl": "PaddleOCRVLImageProcessor", "glm_ocr": "Glm46VImageProcessor"}
    processor = named.get(kind, "Glm4vImageProcessor" if glm else "Qwen2VLImageProcessor")
    frames = 2 if glm else 1
    return {
        "image_processor_type": processor,
        "size": {
            "shortest_edge": 4 * square * frames,
            "longest_edge": PLACES_MAX * square * frames,
        },
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": vision.get("temporal_patch_size", 1),
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def vlm_weights(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, mx.array]:
    """Return a random array for every parameter, by mlx-vlm's names."""
    keys = iter(mx.random.split(mx.random.key(seed), 4096))
    weights: dict[str, mx.array] = {}
    for name, array in parameters_of(hollow_seeing(str(config["model_type"]), config)):
        noise = mx.random.normal(array.shape, key=next(keys))
        if ("norm" in name or name.endswith("ln_q.weight")) and array.ndim == 1:
            weights[name] = 0.1 * noise + (1.0 if name.endswith("weight") else 0.0)
        elif array.ndim < 2:
            weights[name] = 0.2 * noise
        else:
            weights[name] = noise * (1.5 / (array.size / array.shape[0]) ** 0.5)
    return weights


def stored_layouts(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return weights as checkpoints have them: convolutions over frames with colours second."""
    return {
        name: array.transpose(0, 4, 1, 2, 3) if array.ndim == 5 else array
        for name, array in weights.items()
    }


class Peer:
    """mlx-vlm's own model of a folder, called directly."""

    def __init__(self, case: Case, folder: Path) -> None:
        stored = mx.load(str(folder / "model.safetensors"))
        assert isinstance(stored, dict)
        self._case = case
        self._model: Any = restore_seeing(case.kind, case.config, stored, None)

    def logits(self) -> mx.array:
        """Return the logits of every position of the prompt with its images, read at once."""
        case = self._case
        patches, grids = process(case)
        ids = mx.array([list(case.prompt)])
        with without_compiling():
            cache = vlm_module("cache").make_prompt_cache(self._model.language_model)
            said = self._model(ids, patches, mask=None, cache=cache, image_grid_thw=grids)
            logits = said.logits[0]
            mx.eval(logits)
        return cast("mx.array", logits)

    def text_logits(self, ids: tuple[int, ...]) -> mx.array:
        """Return the logits of a text, read at once; nothing of a former prompt is left."""
        for kept in ("_position_ids", "_rope_deltas"):
            setattr(self._model.language_model, kept, None)
        with without_compiling():
            cache = vlm_module("cache").make_prompt_cache(self._model.language_model)
            said = self._model(mx.array([list(ids)]), None, mask=None, cache=cache)
            mx.eval(said.logits)
        return cast("mx.array", said.logits[0])


def process(case: Case) -> tuple[mx.array, mx.array]:
    """Return what transformers' processor makes of the images, which have their sizes already."""
    settings = case.settings
    in_rows = VLM_TYPES[case.kind].in_rows
    kind = PaddleOCRVLImageProcessorPil if in_rows else Qwen2VLImageProcessorPil
    frames = case.config["vision_config"].get("temporal_patch_size", 1)
    own = {name: settings[name] for name in ("patch_size", "merge_size", "image_mean", "image_std")}
    processor = kind(**own, temporal_patch_size=frames, do_resize=False)
    made = processor(images=case.pixels(), input_data_format="channels_last")
    patches = mx.array(np.asarray(made["pixel_values"], dtype=np.float32))
    patches = patches[None] if in_rows else patches
    return patches, mx.array(np.asarray(made["image_grid_thw"]))


def worst_error(case: Case, folder: Path, model: Model) -> float:
    """Return the largest error of a prompt with images in chunks, then decoded with a text."""
    peer, shown, caches = Peer(case, folder), shown_by(model, folder, case), caches_of(model)
    texts = (shown.prompt, TEXT)
    expected = (peer.logits(), peer.text_logits(TEXT))
    begun = (replace(shown, prompt=shown.prompt[:-STEPS]), Shown(TEXT[:-STEPS]))
    rows = (RowId(10), RowId(11))
    errors = [
        error(read(model, caches, prompt, widths, row=row), logits[:-STEPS])
        for prompt, widths, row, logits in zip(begun, ([7, 3], [4]), rows, expected, strict=True)
    ]
    for at in range(-STEPS, 0):
        offsets = [len(text) + at for text in texts]
        caches.reserve_all({row: offset + 1 for row, offset in zip(rows, offsets, strict=True)})
        batch = Batch.decode([text[at] for text in texts], offsets, rows, shifts=[shown.shift, 0])
        logits = model.logits(model.forward(batch, caches))
        mx.eval(logits, caches.state())
        errors.append(error(logits, mx.stack([each[at] for each in expected])))
    return max(errors)


def write_served(folder: Path, case: Case) -> Path:
    """Write a whole folder for a worker, with tokenizer and template; return it."""
    write_text_files(folder)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens([PLACE_TEXT])
    tokenizer.save(file)
    vocab, place = tokenizer.get_vocab_size(), tokenizer.token_to_id(PLACE_TEXT)
    own = replace(case, text={**case.text, "vocab_size": vocab, "image_token_id": place})
    write_model(folder, own.config, stored_layouts(vlm_weights(own.config)))
    write_json(folder / "preprocessor_config.json", own.settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


CASES: Final = _kinds()
