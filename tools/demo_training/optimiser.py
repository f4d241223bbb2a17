"""Two update rules over one flat dictionary of parameters.

AdamW moves every parameter, or, in the Muon recipe, only the embedding and the norms; Muon then
moves each weight matrix by its orthogonalised momentum (a quintic Newton-Schulz iteration),
scaled so that an update has about AdamW's size and one learning rate serves both. Matrices of
one shape are orthogonalised together: a GPU's time goes into launches, not sums.
"""

import math
from dataclasses import dataclass

import mlx.core as mx

from demo_training.forward import Parameters

State = dict[str, Parameters]

ADAM_BETAS = (0.9, 0.95)
ADAM_EPSILON = 1e-8
MUON_MOMENTUM = 0.95
MUON_ITERATIONS = 5
MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MUON_UPDATE_SIZE = 0.2
"""Root mean square of one Muon update at learning rate 1; AdamW's is found near this."""
GRADIENT_NORM_MAX = 1.0


@dataclass(frozen=True, slots=True)
class Rule:
    """Which parameters go by Muon, and how strongly matrices decay."""

    muon: bool
    weight_decay: float

    def moves_by_muon(self, name: str) -> bool:
        """Tell whether Muon moves this parameter."""
        return self.muon and ".layers." in name and name.endswith("_proj.weight")


def initial_state(parameters: Parameters, rule: Rule) -> State:
    """Return zeroed moments: `first` for all, `second` for what AdamW moves."""
    return {
        "first": {name: mx.zeros_like(value) for name, value in parameters.items()},
        "second": {
            name: mx.zeros_like(value)
            for name, value in parameters.items()
            if not rule.moves_by_muon(name)
        },
    }


def update(
    parameters: Parameters,
    gradients: Parameters,
    state: State,
    rule: Rule,
    rate: mx.array,
    step: mx.array,
) -> tuple[Parameters, State]:
    """Return the parameters and state after one step; `step` counts from 1."""
    gradients = _clip(gradients)
    first, second = dict(state["first"]), dict(state["second"])
    directions: Parameters = {}
    momenta: Parameters = {}
    for name, gradient in gradients.items():
        if rule.moves_by_muon(name):
            first[name] = MUON_MOMENTUM * first[name] + (1 - MUON_MOMENTUM) * gradient
            momenta[name] = (1 - MUON_MOMENTUM) * gradient + MUON_MOMENTUM * first[name]
            continue
        beta_first, beta_second = ADAM_BETAS
        first[name] = beta_first * first[name] + (1 - beta_first) * gradient
        second[name] = beta_second * second[name] + (1 - beta_second) * gradient.square()
        mean = first[name] / (1 - mx.power(beta_first, step))
        variance = second[name] / (1 - mx.power(beta_second, step))
        directions[name] = mean / (mx.sqrt(variance) + ADAM_EPSILON)
    directions |= _orthogonalise(momenta)
    moved = {
        name: value * (1 - rate * _decay(name, value, rule)) - rate * directions[name]
        for name, value in parameters.items()
    }
    return moved, {"first": first, "second": second}


def _decay(name: str, value: mx.array, rule: Rule) -> float:
    return rule.weight_decay if value.ndim == 2 and "embed" not in name else 0.0


def _clip(gradients: Parameters) -> Parameters:
    squares = mx.stack([gradient.square().sum() for gradient in gradients.values()])
    scale = mx.minimum(1.0, GRADIENT_NORM_MAX / (mx.sqrt(squares.sum()) + 1e-6))
    return {name: gradient * scale for name, gradient in gradients.items()}


def _orthogonalise(momenta: Parameters) -> Parameters:
    """Return each matrix with its singular values near one, scaled to Muon's update size."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, matrix in momenta.items():
        groups.setdefault(tuple(matrix.shape), []).append(name)
    directions: Parameters = {}
    for (rows, columns), names in groups.items():
        stacked = mx.stack([momenta[name] for name in names])
        scale = MUON_UPDATE_SIZE * math.sqrt(max(rows, columns))
        for name, matrix in zip(names, _newton_schulz(stacked), strict=True):
            directions[name] = scale * matrix
    return directions


def _newton_schulz(stacked: mx.array) -> mx.array:
    """Push the singular values of each `[count, rows, columns]` matrix towards one."""
    tall = stacked.shape[1] > stacked.shape[2]
    x = stacked.transpose(0, 2, 1) if tall else stacked
    norms = mx.sqrt(x.square().sum(axis=(1, 2), keepdims=True))
    x = (x / (norms + 1e-7)).astype(mx.bfloat16)
    a, b, c = MUON_COEFFICIENTS
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.transpose(0, 2, 1)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    x = x.astype(mx.float32)
    return x.transpose(0, 2, 1) if tall else x
