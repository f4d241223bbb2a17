"""mlx-vlm itself: its models' modules and nothing else of it, and weights put into them.

Invariants:
- Its package is never run: that would import its programs, and with them decoders of files, audio
  and data sets. Modules of models are imported beneath it alone.
- Weights are turned into its own as it does when it loads: by the model, its tower and its text.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx

from mlxd_models.families.common.packing import Packings
from mlxd_worker.models.zoo.peer import fill, make_hollow, module_of

if TYPE_CHECKING:  # see `zoo.peer`
    from mlx.nn.layers.base import Module

MLX_VLM: Final = "mlx-vlm"
PACKAGES: Final = ("mlx_vlm", "mlx_vlm.models")
PARTS: Final = ("text", "vision")
TOWERS: Final = ("vision_tower", "visual")
"""What types call their tower."""
_LOCK: Final = threading.Lock()


def vlm_module(name: str, *, within: str = "") -> Any:  # noqa: ANN401 - no types there
    """Import one of mlx-vlm's modules of models, or one `within` a type's own package.

    Raises:
        InvalidModel: it cannot be imported.
    """
    with _LOCK:
        packages = [*PACKAGES, f"{PACKAGES[-1]}.{within}"] if within else list(PACKAGES)
        for package in packages:
            _have_bare(package)
        return module_of(name, package=packages[-1], library=MLX_VLM)


def hollow_seeing(name: str, config: Mapping[str, Any]) -> Module:
    """Return a model of zeros without memory; raises InvalidModel if mlx-vlm refuses the config."""
    module, configs = vlm_module(name, within=name), vlm_module("config", within=name)

    def make(values: dict[str, Any]) -> Any:  # noqa: ANN401 - no types there
        values.setdefault("text_config", {})
        whole = configs.ModelConfig.from_dict(values)
        for part in PARTS:
            stated = values.get(f"{part}_config")
            if stated is not None:
                kind = vars(configs)[f"{part.title()}Config"]
                setattr(whole, f"{part}_config", kind.from_dict(stated))
        return module.Model(whole)

    return make_hollow(f"{MLX_VLM}'s {name}", make, config)


def restore_seeing(
    name: str,
    config: Mapping[str, Any],
    stored: dict[str, mx.array],
    packings: Packings | None,
) -> Module:
    """Return a model that holds what is stored, lazily, packed where that is; raises as `fill`."""
    peer = hollow_seeing(name, config)
    parts = [peer, tower_of(peer), peer.language_model]
    steps = [part.sanitize for part in parts if "sanitize" in dir(part)]
    return fill(peer, f"{MLX_VLM}'s {name}", stored, packings, steps)


def tower_of(peer: Module) -> Any:  # noqa: ANN401 - no types there
    """Return a model's tower."""
    return next(peer[name] for name in TOWERS if name in peer)


def unpack_seeing(peer: Module) -> None:
    """Turn modules that are packed into plain ones, lazily."""
    from mlx.nn.layers.embedding import Embedding  # noqa: PLC0415 - see `zoo.peer`
    from mlx.nn.layers.linear import Linear  # noqa: PLC0415 - likewise
    from mlx.utils import tree_unflatten  # noqa: PLC0415 - likewise

    switches = vlm_module("switch_layers")
    plain: list[tuple[str, Any]] = []
    untyped: Any = peer
    for path, module in untyped.named_modules():
        if "scales" not in module:
            continue
        weight = mx.dequantize(
            module.weight, module.scales, module.get("biases"),
            group_size=module.group_size, bits=module.bits, mode=module.mode,
        )  # fmt: skip
        biased = "bias" in module
        if isinstance(module, switches.QuantizedSwitchLinear):
            experts, outputs, inputs = weight.shape
            made = switches.SwitchLinear(inputs, outputs, experts, bias=biased)
        elif weight.ndim == 2 and "as_linear" in dir(module):
            made = Embedding(*weight.shape)
        else:
            made = Linear(weight.shape[1], weight.shape[0], bias=biased)
        made.weight = weight
        if biased:
            made.bias = module.bias
        plain.append((path, made))
    if plain:
        untyped.update_modules(tree_unflatten(plain))


def _have_bare(name: str) -> None:
    """Have a package that modules are found beneath, and of which nothing is run."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is not None:
        sys.modules[name] = importlib.util.module_from_spec(spec)
