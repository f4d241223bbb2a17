"""Each architecture against mlx-lm, as a table: `python -m tests.worker.conformance` writes it.

The figure is the largest difference of a logit over every position of a prompt, read in chunks and
one by one, relative to the largest logit, in float32; of all variants of an architecture the worst.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import mlx.core as mx

from mlxd_models.families.common.packing import MODES, PackingMode
from mlxd_models.families.registry import REGISTRY
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.models.base import Model
from tests.support.gemma3_cases import CASES as GEMMAS
from tests.support.gemma3_cases import GOLDEN as GEMMA_LOGITS
from tests.support.gemma3_cases import Case as WholeCase
from tests.support.golden_logits import COLUMNS, read_golden
from tests.support.llava_cases import CASES as LLAVAS
from tests.support.llava_cases import GOLDEN as LLAVA_LOGITS
from tests.support.llava_cases import Case as LlavaCase
from tests.support.qwen3_vl_cases import CASES as QWEN3_VLS
from tests.support.qwen3_vl_cases import GOLDEN as QWEN3_VL_LOGITS
from tests.support.qwen3_vl_cases import TYPES as QWEN3_VL_TYPES
from tests.support.qwen_vl_cases import CASES as QWEN_VLS
from tests.support.qwen_vl_cases import GOLDEN as QWEN_VL_LOGITS
from tests.support.qwen_vl_cases import Case as ShapedCase
from tests.support.shown import SeenCase, Shown, read_whole, shown_by, squares_shown_by
from tests.worker import vlm_conformance, zoo_conformance
from tests.worker.hybrid import (
    convert,
    error,
    hybrid_config,
    hybrid_weights,
    peer_logits,
    token_ids,
)
from tests.worker.hybrid_experts import WHOLE, expert_weights, packed_experts
from tests.worker.kin import GROUP, all_logits, build, kin_weights, quantise
from tests.worker.latent import latent_weights, packed_latent
from tests.worker.models import test_gemma3 as test_models_gemma3
from tests.worker.models import test_gpt_oss as test_models_gpt_oss
from tests.worker.models import test_latent as test_models_latent
from tests.worker.models import test_llama as test_models_llama
from tests.worker.models import test_qwen3 as test_models_qwen3
from tests.worker.models import test_qwen3_5 as test_models_qwen3_5
from tests.worker.models import test_qwen3_next as test_models_qwen3_next
from tests.worker.models import test_sliding as test_models_sliding
from tests.worker.tiny import config_with, load, random_weights, write_model

TABLE: Final = Path(__file__).parents[2] / "docs" / "models.md"
TOKENS: Final = 120
PACKED: Final[tuple[Mapping[str, Any], ...]] = (
    {"bits": 4},
    {"bits": 8},
    {"bits": 4, "mode": "mxfp4", "group": 32},
    {"bits": 8, "mode": "mxfp8", "group": 32},
    {"bits": 4, "mode": "nvfp4", "group": 16},
)
NONE: Final = "none"
BITS: Final = sorted(MODES[PackingMode.AFFINE].bits)
FORMATS: Final = f"affine ({', '.join(map(str, BITS))} bits), mxfp4, mxfp8, nvfp4, fp8 blocks"

INTRODUCTION: Final = (
    "Written by `python -m tests.worker.conformance`: tiny random models of every variant of an",
    "architecture that mlx-lm has too, float32 on a CPU. The figures are the largest difference of",
    "a logit from mlx-lm's, over every position, relative to the largest logit: of weights as",
    "published, and the worst of weights that mlx-lm's converter has packed in 4 and in 8 bits, as",
    "mxfp4, mxfp8 and nvfp4; 0 is bit for bit, with the BLAS that MLX brings. Every width and",
    "group of integers, global scales and 8-bit floats in blocks are held to mlx-lm, or to the",
    "numbers that they stand for, in `tests/worker/models/test_formats.py`. Windows of Mistral and",
    "Qwen2, which mlx-lm has not, are held to dense attention in",
    "`tests/worker/models/test_sliding.py`. Keys and values in 8 or 4 bits (`quantized`) need",
    "heads whose width 32 divides. Figures of models that see are the distance from",
    "transformers' own logits, of prompts with images (`tests/support/llava_reference.py`,",
    "`tests/support/qwen_vl_reference.py`, `tests/support/qwen3_vl_reference.py`); Gemma 3's are",
    "of both (`gemma3_reference.py` there).",
)

GEMMA: Final = "Gemma3ForConditionalGeneration"
LLAVA: Final = "LlavaForConditionalGeneration"
QWEN_VL: Final = "Qwen2_5_VLForConditionalGeneration"

Weights = Callable[[Mapping[str, Any]], dict[str, mx.array]]
Stored = tuple[dict[str, Any], dict[str, mx.array]]


class Packer(Protocol):
    """Makes a quantised checkpoint."""

    def __call__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, mx.array],
        /,
        *,
        bits: int = 4,
        mode: str = "affine",
        group: int = GROUP,
    ) -> Stored:
        """Return its config and weights."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """One variant of an architecture."""

    config: Mapping[str, Any]
    weights: Weights = kin_weights
    packer: Packer | None = quantise
    """What mlx-lm's converter makes of config and weights, by such settings."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One architecture's row of the table."""

    architecture: str
    variants: int = 0
    kinds: frozenset[Kind] = frozenset()
    worst: float = 0.0
    worst_packed: float | None = None

    def line(self) -> str:
        """Return the row."""
        kinds = ", ".join(sorted(kind.name.lower() for kind in self.kinds))
        if self.worst_packed is None:
            packings, packed = NONE, ""
        else:
            packings, packed = FORMATS, _figure(self.worst_packed)
        cells = [f"`{self.architecture}`", kinds, packings, str(self.variants), _figure(self.worst)]
        return f"| {' | '.join([*cells, packed])} |".replace("|  |", "| |")


def _figure(worst: float) -> str:
    return f"{worst:.0e}" if worst else "0"


def cases() -> Iterator[Case]:
    """Return every variant that mlx-lm has too; its own Qwen2 and Mistral know no windows."""
    wide = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    for name, changes in test_models_llama.VARIANTS.items():
        if name != "mistral":
            yield Case(config_with(**{**wide, **changes}), random_weights)
    for family, model_type in (("Mistral", "llama"), ("Qwen2", "qwen2")):
        names = {"architectures": [f"{family}ForCausalLM"], "model_type": model_type}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None}
        yield Case(config_with(**wide | heads | names), random_weights)
    for kin in (test_models_qwen3, test_models_gemma3, test_models_gpt_oss):
        for config in kin.VARIANTS.values():
            yield Case(config)
    for variant in ("plain", "linear rope"):
        yield Case(test_models_gemma3.nested_config(variant), test_models_gemma3.nested_weights)
    for changes in test_models_qwen3_5.VARIANTS.values():
        wider = {"head_dim": 32, **changes}
        yield Case(hybrid_config(**wider), hybrid_weights, packer=None)
    yield Case(hybrid_config(**test_models_qwen3_5.WIDE), hybrid_weights, packer=_packed_hybrid)
    for config in test_models_qwen3_next.VARIANTS.values():
        yield Case(config, expert_weights, packer=_packed_experts)
    for config in test_models_latent.VARIANTS.values():
        yield Case(config, latent_weights, packer=_packed_latent)


def _packed_hybrid(
    config: Mapping[str, Any], weights: Mapping[str, mx.array], **settings: Any
) -> Stored:
    return quantise(config, convert(weights), whole=WHOLE, **settings)


def _packed_experts(
    config: Mapping[str, Any], weights: Mapping[str, mx.array], **settings: Any
) -> Stored:
    del weights
    return packed_experts(config, **settings)


def _packed_latent(
    config: Mapping[str, Any], weights: Mapping[str, mx.array], **settings: Any
) -> Stored:
    del weights
    return packed_latent(config, **settings)


def findings() -> list[Finding]:
    """Run every case; return what was found, by architecture."""
    findings_by_name = {name: Finding(name) for name in sorted(REGISTRY)}
    for case in cases():
        (name,) = case.config["architectures"]
        findings_by_name[name] = _with(findings_by_name[name], case)
    seeing = _by_golden(GEMMA, GEMMAS, GEMMA_LOGITS, squares_shown_by)
    findings_by_name[GEMMA] = _together(findings_by_name[GEMMA], seeing)
    findings_by_name[LLAVA] = _by_golden(LLAVA, LLAVAS, LLAVA_LOGITS, squares_shown_by)
    findings_by_name[QWEN_VL] = _by_golden(QWEN_VL, QWEN_VLS, QWEN_VL_LOGITS, shown_by)
    for name in QWEN3_VL_TYPES:
        own = [case for case in QWEN3_VLS if case.architecture == name]
        findings_by_name[name] = _by_golden(name, own, QWEN3_VL_LOGITS, shown_by)
    for name in test_models_sliding.VARIANTS:
        config = test_models_sliding.config_of(name)
        (architecture,) = config["architectures"]
        with tempfile.TemporaryDirectory() as folder:
            kinds = _kinds(build(write_model(Path(folder), config)))
        findings_by_name[architecture] = replace(
            findings_by_name[architecture], kinds=findings_by_name[architecture].kinds | kinds
        )
    return list(findings_by_name.values())


def _together(one: Finding, other: Finding) -> Finding:
    """Return what was found of one architecture in both."""
    return replace(
        one,
        variants=one.variants + other.variants,
        kinds=one.kinds | other.kinds,
        worst=max(one.worst, other.worst),
    )


def _by_golden(
    name: str,
    cases: Sequence[LlavaCase | ShapedCase | WholeCase],
    file: Path,
    show: Callable[[Model, Path, SeenCase], Shown],
) -> Finding:
    """Return what was found of a family that sees, which mlx-lm has not.

    Its logits are compared with transformers' in a file, in the columns that it has.
    """
    worst, kinds, golden = 0.0, frozenset[Kind](), read_golden(file)
    for case in cases:
        with tempfile.TemporaryDirectory() as scratch:
            folder = case.write(Path(scratch) / "model")
            model = load(folder)
            logits = read_whole(model, show(model, folder, case))
            expected = mx.array(golden[case.name])
            worst = max(worst, error(logits[:, mx.array(COLUMNS)], expected))
            kinds |= _kinds(model)
    return Finding(name, len(cases), kinds, worst)


def _with(so_far: Finding, case: Case) -> Finding:
    config, weights, packed_worst = case.config, case.weights(case.config), so_far.worst_packed
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch) / "plain", config, weights)
        model = build(folder)
        worst = max(so_far.worst, _error(model, folder))
        for number, settings in enumerate(() if case.packer is None else PACKED):
            assert case.packer is not None, "there are settings"
            stored = case.packer(config, weights, **settings)
            packed = write_model(Path(scratch) / str(number), *stored)
            distance = _error(build(packed, packed=True), packed)
            packed_worst = max(packed_worst or 0.0, distance)
        kinds = so_far.kinds | _kinds(model)
    return Finding(so_far.architecture, so_far.variants + 1, kinds, worst, packed_worst)


def _error(model: Model, folder: Path) -> float:
    tokens = token_ids(TOKENS, seed=1)
    distance = error(all_logits(model, tokens), peer_logits(folder, tokens))
    assert math.isfinite(distance)
    return distance


def _kinds(model: Model) -> frozenset[Kind]:
    caches = model.new_caches()
    if any(geometry and _quantises(geometry) for geometry in model.attention):
        caches += model.new_caches(kv=KVFormat.Q8)
    return frozenset(cache.kind for cache in caches if cache is not None)


def _quantises(geometry: AttentionGeometry) -> bool:
    return geometry.latent_dim is None and geometry.head_dim % 32 == 0


def table(results: list[Finding]) -> str:
    """Return docs/models.md."""
    lines = [
        "# Models",
        "",
        *INTRODUCTION,
        "",
        "| architecture | caches | packed weights | variants | error | error, packed |",
        "|---|---|---|---|---|---|",
        *(finding.line() for finding in results),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sections = (table(findings()), vlm_conformance.section(), zoo_conformance.section())
    TABLE.write_text("\n".join(sections), encoding="utf-8")
    sys.stdout.write(TABLE.read_text(encoding="utf-8"))
