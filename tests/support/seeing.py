"""Tiny random models that see, whole folders for a worker, and pictures to show them.

Weights are float32 and the same on every machine for one seed (`random_model`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from tests.support.random_model import TINY, decoder_config, write_random_model
from tests.support.tiny_model import write_json

SIDE, PATCH = 24, 8
TOKENS = (SIDE // PATCH) ** 2
PLACE = "<image>"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
LISTS_ALONE = (
    "{% for m in messages %}{{ m.role }}: "
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }} "
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""Writes nothing of a content that is no list, and an image before all texts of its message."""
TOWERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "clip": MappingProxyType({"model_type": "clip_vision_model"}),
        "siglip": MappingProxyType({"model_type": "siglip_vision_model"}),
    }
)
TEXTS = MappingProxyType(
    {
        "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    }
)  # fmt: skip
_PROCESSORS = MappingProxyType({"clip": "CLIPImageProcessor", "siglip": "SiglipImageProcessor"})


def seeing_config(
    *, tower: str = "clip", text: str = "llama", token_id: int = 5, **more: Any
) -> dict[str, Any]:
    """Return the config.json of a tiny LLaVA; `more` are keys beside text and tower."""
    nested = decoder_config(TEXTS[text], TINY, model_type=text, tie_word_embeddings=False)
    del nested["bos_token_id"], nested["eos_token_id"], nested["architectures"]
    if text == "mistral":
        nested["sliding_window"] = None
    vision = {
        **TOWERS[tower],
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    strategy = "default" if tower == "clip" else "full"
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": nested,
        "vision_config": vision,
        "image_token_id": token_id,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": strategy,
        **more,
    }


def write_seeing_model(
    folder: Path,
    *,
    tower: str = "clip",
    text: str = "llama",
    template: str = TEMPLATE,
    seed: int = 1,
    **more: Any,
) -> Path:
    """Write a tiny LLaVA with tokenizer, template and image settings; return `folder`."""
    config = seeing_config(tower=tower, text=text, **more)
    write_placed_model(folder, config, template=template, seed=seed)
    return write_image_settings(folder, SIDE, tower=tower)


def write_placed_model(
    folder: Path, config: Mapping[str, Any], *, template: str = TEMPLATE, seed: int = 1
) -> None:
    """Write a random model whose tokenizer knows an image's place, and a template; no settings."""
    write_random_model(folder, dict(config), seed=seed)
    add_place(folder, template=template)


def add_place(folder: Path, *, template: str = TEMPLATE) -> None:
    """Teach the tokenizer of a model's folder an image's place; add the template that writes it."""
    add_tokens(folder, {"image_token_id": PLACE}, template=template)


def add_tokens(folder: Path, texts: Mapping[str, str], *, template: str) -> None:
    """Teach a folder's tokenizer special tokens, its config their ids by key; add a template."""
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens([*texts.values()])
    tokenizer.save(file)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ids = {key: tokenizer.token_to_id(text) for key, text in texts.items()}
    write_json(folder / "config.json", config | ids)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_image_settings(folder: Path, side: int, *, tower: str = "clip") -> Path:
    """Write how images become squares of `side` pixels; return `folder`."""
    write_json(folder / "preprocessor_config.json", image_settings(side, tower=tower))
    return folder


def image_settings(side: int, *, tower: str = "clip") -> dict[str, Any]:
    """Return a preprocessor_config.json."""
    square = {"height": side, "width": side}
    clips = tower == "clip"
    return {
        "image_processor_type": _PROCESSORS[tower],
        "do_resize": True,
        "do_center_crop": clips,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": side} if clips else square,
        **({"crop_size": square} if clips else {}),
        "image_mean": [0.48145466, 0.4578275, 0.40821073] if clips else [0.5, 0.5, 0.5],
        "image_std": [0.26862954, 0.26130258, 0.27577711] if clips else [0.5, 0.5, 0.5],
    }


def picture(number: int, *, width: int = 31, height: int = 40) -> Image.Image:
    """Return a picture of smooth colours and some noise, another one for each number."""
    draws = np.random.Generator(np.random.PCG64(number))
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [
        127 + 100 * np.sin(rows * draws.uniform(0.05, 0.6) + columns * draws.uniform(0.05, 0.6))
        for _ in range(3)
    ]
    noise = draws.integers(-20, 20, (height, width, 3))
    return Image.fromarray((np.stack(waves, axis=-1) + noise).clip(0, 255).astype(np.uint8))


def encode_image(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture as a file's bytes."""
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def change_pixel(image: Image.Image) -> Image.Image:
    """Return a picture of which one pixel is another by the least that there is."""
    other = image.copy()
    red, green, blue = other.getpixel((3, 5))  # type: ignore[misc]
    other.putpixel((3, 5), (red ^ 1, green, blue))
    return other


def place_of(folder: Path) -> int:
    """Return the token that stands for an image in the model of `folder`."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(config["image_token_id"])
