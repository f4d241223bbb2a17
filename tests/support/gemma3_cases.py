"""Gemma 3s that see, whose logits a reference has written down: what they are, what they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlxd_worker.engine.request import Image
from tests.support.random_model import TINY, decoder_config, write_random_model
from tests.support.seeing import add_tokens
from tests.support.tiny_model import write_json

GOLDEN: Final = Path(__file__).parents[1] / "data" / "models" / "gemma3_logits.json"
"""Written by `python -m tests.support.gemma3_reference`."""
PLACE, BEFORE, BEHIND = 5, 6, 7
PIECES: Final = ((77, 41, 8, BEFORE), (BEHIND, 90, BEFORE), (BEHIND, 33, 12, 200, 150, 61, 9, 64))
"""The text around two images."""
MARKS: Final[Mapping[str, str]] = {
    "image_token_index": "<image_soft_token>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
}
TEMPLATE: Final = (
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
HIDDEN: Final = 64
"""Of the text: bfloat16 holds its root, by which embeddings are multiplied, in whole."""
WINDOW: Final = 12
"""Positions that most layers see: fewer than an image has."""
_TEXT_KEYS: Final = ("architectures", "bos_token_id", "eos_token_id")
_VISION: Final[Mapping[str, Any]] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
}


def seeing_gemma3_config(
    *,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the config.json of a tiny Gemma 3 that sees; `more` are keys beside both parts."""
    own = {
        "model_type": "gemma3_text",
        "hidden_size": HIDDEN,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 1000.0,
        "query_pre_attn_scalar": 12,
        "hidden_activation": "gelu_pytorch_tanh",
        **(text or {}),
    }
    nested = decoder_config("Gemma3ForConditionalGeneration", TINY, **own)
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {key: nested[key] for key in nested if key not in _TEXT_KEYS},
        "vision_config": {**_VISION, **(vision or {})},
        "mm_tokens_per_image": 16,
        "image_token_index": PLACE,
        "boi_token_index": BEFORE,
        "eoi_token_index": BEHIND,
        **more,
    }


def panning_settings(side: int, **changes: Any) -> dict[str, Any]:
    """Return a preprocessor_config.json, as published but for the size."""
    return {
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_pan_and_scan": None,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Gemma3ImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": side, "width": side},
        **changes,
    }


def write_marked_model(folder: Path) -> Path:
    """Write a tiny one with tokenizer, template and image settings; return `folder`."""
    config = seeing_gemma3_config()
    write_random_model(folder, config)
    add_marks(folder)
    settings = panning_settings(config["vision_config"]["image_size"])
    write_json(folder / "preprocessor_config.json", settings)
    return folder


def add_marks(folder: Path) -> None:
    """Teach the tokenizer of a model's folder what stands for an image; add the template."""
    add_tokens(folder, MARKS, template=TEMPLATE)


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration, and how many images its prompt has."""

    name: str
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    shown: int = 2

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return seeing_gemma3_config(text=self.text, vision=self.vision, **self.more)

    @property
    def side(self) -> int:
        """Of an image, in pixels."""
        return int(self.config["vision_config"]["image_size"])

    @property
    def tokens(self) -> int:
        """Places of an image."""
        return int(self.config["mm_tokens_per_image"])

    @property
    def prompt(self) -> tuple[int, ...]:
        """Text, and before all pieces of it but the first an image."""
        image = (PLACE,) * self.tokens
        pieces = [*PIECES[: self.shown], PIECES[-1]] if self.shown else [PIECES[0], PIECES[-1]]
        between = [image] * self.shown + [()] * (len(pieces) - self.shown)
        return tuple(
            token
            for piece, behind in zip(pieces, between, strict=True)
            for token in (*piece, *behind)
        )

    @property
    def images(self) -> tuple[Image, ...]:
        """The images at their places."""
        starts = [at for at, token in enumerate(self.prompt) if token == BEFORE][: self.shown]
        return tuple(
            Image(b"%d" % start, start + 1, self.tokens, pixels.tobytes(), whole=True)
            for start, pixels in zip(starts, self.pixels(), strict=False)
        )

    def pixels(self) -> np.ndarray[Any, Any]:
        """Return two images, uint8 [2, side, side, 3]."""
        draws = np.random.Generator(np.random.PCG64(9))
        return draws.integers(0, 256, (2, self.side, self.side, 3), dtype=np.uint8)

    def write(self, folder: Path) -> Path:
        """Write the model; return its folder."""
        write_random_model(folder, self.config)
        write_json(folder / "preprocessor_config.json", panning_settings(self.side))
        return folder


CASES: Final = (
    Case("windows"),
    Case("all-full", text={"sliding_window_pattern": 1}),
    Case("wide-windows", text={"sliding_window": 40, "sliding_window_pattern": 3}),
    Case("one-image", shown=1, text={"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    Case("text-alone", shown=0),
    Case("not-averaged", vision={"image_size": 16}),
    Case("uneven", vision={"image_size": 30}, more={"mm_tokens_per_image": 9}),
    Case("large-squares", more={"mm_tokens_per_image": 4}, vision={"hidden_act": "gelu"}),
)
