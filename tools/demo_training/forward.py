"""The model in MLX, as training needs it: whole windows, no cache, any float type.

Parameters are one flat dictionary under the published tensor names, so that what is trained is
what is written.
"""

import math
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from demo_training.shape import Shape

Parameters = dict[str, mx.array]

INITIAL_DEVIATION = 0.02


def initial_parameters(shape: Shape, seed: int) -> Parameters:
    """Draw float32 parameters: norms one, the rest normal, residual outputs scaled down."""
    residual_scale = 1 / math.sqrt(2 * shape.num_hidden_layers)
    keys = iter(mx.random.split(mx.random.key(seed), len(shape.tensors())))
    parameters: Parameters = {}
    for (name, dims), key in zip(shape.tensors().items(), keys, strict=True):
        if len(dims) == 1:
            parameters[name] = mx.ones(dims)
            continue
        is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        deviation = INITIAL_DEVIATION * (residual_scale if is_residual else 1)
        parameters[name] = mx.random.normal(dims, scale=deviation, key=key)
    return parameters


@dataclass(frozen=True, slots=True)
class Dropout:
    """Zeroes a share of the embedding's and of each block's outputs while training."""

    share: float
    keys: mx.array

    @classmethod
    def with_keys(cls, share: float, key: mx.array, shape: Shape) -> Self:
        """Give each place of a model of this shape a key of its own."""
        return cls(share, mx.random.split(key, 2 * shape.num_hidden_layers + 1))

    def apply(self, rows: mx.array, place: int) -> mx.array:
        """Return `rows` with the share zeroed and the rest scaled up."""
        kept = mx.random.bernoulli(1 - self.share, rows.shape, key=self.keys[place])
        return rows * (kept.astype(rows.dtype) * (1 / (1 - self.share)))


def logits(
    parameters: Parameters, ids: mx.array, shape: Shape, dropout: Dropout | None = None
) -> mx.array:
    """Return next-token logits `[batch * length, vocabulary]` for `ids` of `[batch, length]`.

    Computed in the type of `parameters`.
    """
    batch, length = ids.shape

    def thin(rows: mx.array, place: int) -> mx.array:
        return rows if dropout is None else dropout.apply(rows, place)

    hidden = _embed(parameters["model.embed_tokens.weight"], ids.reshape(-1))
    hidden = thin(hidden, 0)
    for layer in range(shape.num_hidden_layers):
        name = f"model.layers.{layer}"
        normed = _norm(parameters, f"{name}.input_layernorm", hidden, shape)
        attended = _attention(parameters, name, normed, (batch, length), shape)
        attended = _linear(parameters, f"{name}.self_attn.o_proj", attended)
        hidden = hidden + thin(attended, 2 * layer + 1)
        normed = _norm(parameters, f"{name}.post_attention_layernorm", hidden, shape)
        gate = _linear(parameters, f"{name}.mlp.gate_proj", normed)
        up = _linear(parameters, f"{name}.mlp.up_proj", normed)
        activated = gate * mx.sigmoid(gate) * up
        activated = _linear(parameters, f"{name}.mlp.down_proj", activated)
        hidden = hidden + thin(activated, 2 * layer + 2)
    hidden = _norm(parameters, "model.norm", hidden, shape)
    return hidden @ parameters["model.embed_tokens.weight"].T


def mean_loss(
    parameters: Parameters,
    windows: mx.array,
    shape: Shape,
    dropout: Dropout | None = None,
    weights: mx.array | None = None,
) -> mx.array:
    """Return the mean loss in nats a token over `windows` of `[batch, length + 1]` ids.

    Each token counts by its place in `weights`, of the same shape, or all alike. Products are made
    in bfloat16, the loss in float32; gradients reach float32 parameters.
    """
    half = {name: value.astype(mx.bfloat16) for name, value in parameters.items()}
    scores = logits(half, windows[:, :-1], shape, dropout).astype(mx.float32)
    targets = windows[:, 1:].reshape(-1, 1)
    chosen = mx.take_along_axis(scores, targets, axis=-1).squeeze(-1)
    losses = mx.logsumexp(scores, axis=-1) - chosen
    if weights is None:
        return mx.mean(losses)
    each = weights[:, 1:].reshape(-1)
    return mx.sum(each * losses) / mx.sum(each)


def _embed(table: mx.array, ids: mx.array) -> mx.array:
    """Return the rows of `table` at `ids`, by a product.

    The gradient of an indexed read is a scattered sum, which on a GPU stands in line at the
    frequent tokens' rows; the gradient of a product is a product.
    """
    chosen = ids[:, None] == mx.arange(table.shape[0], dtype=ids.dtype)
    return chosen.astype(table.dtype) @ table


def _linear(parameters: Parameters, name: str, rows: mx.array) -> mx.array:
    return rows @ parameters[f"{name}.weight"].T


def _norm(parameters: Parameters, name: str, rows: mx.array, shape: Shape) -> mx.array:
    return mx.fast.rms_norm(rows, parameters[f"{name}.weight"], shape.rms_norm_eps)


def _attention(
    parameters: Parameters, name: str, rows: mx.array, extent: tuple[int, int], shape: Shape
) -> mx.array:
    def heads(projection: str, count: int) -> mx.array:
        flat = _linear(parameters, f"{name}.self_attn.{projection}", rows)
        return flat.reshape(*extent, count, shape.head_dim).transpose(0, 2, 1, 3)

    queries = _rotate(heads("q_proj", shape.num_attention_heads), shape)
    keys = _rotate(heads("k_proj", shape.num_key_value_heads), shape)
    values = heads("v_proj", shape.num_key_value_heads)
    mixed = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=shape.head_dim**-0.5, mask="causal"
    )
    return mixed.transpose(0, 2, 1, 3).reshape(rows.shape[0], -1)


def _rotate(heads: mx.array, shape: Shape) -> mx.array:
    return mx.fast.rope(
        heads, shape.head_dim, traditional=False, base=shape.rope_theta, scale=1.0, offset=0
    )
