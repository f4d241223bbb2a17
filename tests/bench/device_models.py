"""Random models of well-known shapes, made in memory for both sides from the same values."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxd_models.families.common.packing import Packing
from mlxd_models.families.common.tensors import Stack
from mlxd_models.families.llama import parse_llama
from mlxd_worker.models.base import Model
from mlxd_worker.models.families.llama import LlamaModel
from mlxd_worker.models.weights.expert_linear import ExpertProjection
from mlxd_worker.models.weights.linear import Linear, PackedLinear, Projection

GROUP_SIZE = 64
BITS = 4
CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """The widths of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool

    def config(self) -> dict[str, Any]:
        """Return its config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
        }


SHAPES: Mapping[str, Shape] = {
    # Qwen3's widths of that size; Llama's layers, which have no norms of queries and keys.
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151936, tied=True),
    "8b": Shape(4096, 32, 32, 8, 128, 14336, 128256, tied=False),
    "tiny": Shape(64, 2, 4, 2, 32, 128, 512, tied=False),
}


def make_peer(shape: Shape, *, packed: bool, dtype: mx.Dtype, seed: int) -> Any:
    """Return mlx-lm's model of this shape with random weights, evaluated layer by layer."""
    module = importlib.import_module("mlx_lm.models.llama")
    nn = importlib.import_module("mlx.nn")
    model = module.Model(module.ModelArgs.from_dict(shape.config()))
    key = mx.random.key(seed)
    for name, array in named_parameters(model).items():
        key, own = mx.random.split(key)
        value = _random(name, array.shape, own).astype(dtype)
        mx.eval(value)
        model.load_weights([(name, value)], strict=False)
        del value
    if packed:
        nn.quantize(model, group_size=GROUP_SIZE, bits=BITS)
    mx.eval(model.parameters())
    mx.clear_cache()
    return model


def named_parameters(model: Any) -> dict[str, mx.array]:
    """Return an mlx-lm model's weights by name."""
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)


def _random(name: str, shape: Sequence[int], key: mx.array) -> mx.array:
    if "norm" in name:
        return mx.ones(shape)
    scale: float = shape[-1] ** -0.5
    return mx.random.normal(shape, key=key, dtype=mx.bfloat16) * scale


def make_ours(shape: Shape, peer: Any) -> Model:
    """Return our model with the peer's weights, joined as a load joins them."""
    weights: Any = PeerWeights(named_parameters(peer))
    return LlamaModel(parse_llama(shape.config()), weights)


class PeerWeights:
    """Where our model takes its tensors from: what a `Reader` has that a Llama asks for."""

    def __init__(self, arrays: Mapping[str, mx.array]) -> None:
        """Read from `arrays`, by the names that checkpoints have."""
        self._arrays = arrays

    @property
    def dtype(self) -> mx.Dtype:
        """The type of what is not packed."""
        return self._arrays["model.norm.weight"].dtype

    @property
    def keeps_packed(self) -> bool:
        """Always: what is packed is measured packed."""
        return True

    def take_stored(self) -> dict[str, mx.array]:
        """Return all tensors."""
        return dict(self._arrays)

    def evaluate(self, arrays: Mapping[str, mx.array]) -> None:
        """Evaluate them together."""
        mx.eval(list(arrays.values()))

    def has(self, name: str) -> bool:
        """Tell whether a tensor is there."""
        return name in self._arrays

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._arrays[name].shape)

    def take(self, name: str) -> mx.array:
        """Return a copy of one tensor."""
        return self.take_stacked([name])

    def take_float32(self, name: str) -> mx.array:
        """Return one tensor as float32."""
        return self.take(name).astype(mx.float32)

    def take_stacked(self, names: Sequence[str]) -> mx.array:
        """Return tensors joined along their first axis, as memory of their own."""
        parts = [self._arrays[name] for name in names]
        joined = mx.concatenate(parts, axis=0) if len(parts) > 1 else parts[0] + 0
        mx.eval(joined)
        return joined

    def experts(self, stacks: Sequence[Stack], *, has_bias: bool = False) -> ExpertProjection:
        """Raise: a Llama has none."""
        raise AssertionError(f"no experts: {stacks}, {has_bias}")

    def linear(self, stems: Sequence[str], *, has_bias: bool = False) -> Projection:
        """Return linears over one input as one."""
        assert not has_bias, "these shapes have none"
        weight = self.take_stacked([f"{stem}.weight" for stem in stems])
        if f"{stems[0]}.scales" not in self._arrays:
            return Linear(weight)
        scales, offsets = (
            self.take_stacked([f"{stem}.{part}" for stem in stems]) for part in ("scales", "biases")
        )
        return PackedLinear(weight, scales, offsets, Packing(group_size=GROUP_SIZE, bits=BITS))


def prompts_of(shape: Shape, *, rows: int, tokens: int, seed: int) -> list[list[int]]:
    """Return random prompts, none like another."""
    ids = mx.random.randint(1, shape.vocab, (rows, tokens), key=mx.random.key(seed))
    return [[int(token) for token in row] for row in _rows(ids)]


def _rows(ids: mx.array) -> Iterator[Any]:
    values: Any = ids.tolist()
    yield from values
