"""mlx-lm itself: its modules, a hollow model of one config, and weights put into it.

Invariants:
- A hollow model's parameters are zeros that take no memory; passes over it are not evaluated.
- What is not checked here is checked by mlx-lm: all that is stored goes into a model or is refused.
- mlx-vlm's models are made and filled likewise (`models.vlm.peer`); errors name the library.
"""

from __future__ import annotations

import copy
import importlib
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlxd_models.families.common.fields import CONFIG_FILE, invalid
from mlxd_models.families.common.packing import Packing, PackingMode, Packings
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.weights.linear import layout_of
from mlxd_worker.models.zoo.caches import Leaves, PeerCaches

if TYPE_CHECKING:  # importing mlx.nn takes a worker 60 ms, which most never need
    from mlx.nn.layers.base import Module

NARROW_TOKENS: Final = 2
WIDE_TOKENS: Final = 64
"""Lengths of the passes in which it is seen what a model remembers."""

Say = Callable[[mx.array, list[Any]], mx.array]
"""Tokens and caches to logits."""

MLX_LM: Final = "mlx-lm"
REASON_CHARS_MAX: Final = 500
"""What is told of a library's error, which may name every tensor."""


def module_of(
    name: str,
    *,
    package: str = "mlx_lm.models",
    library: str = MLX_LM,
) -> Any:  # noqa: ANN401 - no types there
    """Import one of a library's modules; raises InvalidModel if it cannot be imported."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return importlib.import_module(f"{package}.{name}")
    except (ImportError, ValueError, SystemExit) as error:  # some end where a package is missing
        raise invalid("model_type", f"{library}'s {name} cannot be imported: {error}") from error
    finally:
        # It lowers how many files the process may have open; a server needs its connections.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def hollow(name: str, config: Mapping[str, Any]) -> Module:
    """Return a model of zeros without memory; raises InvalidModel if mlx-lm refuses the config."""
    module = module_of(name)
    return make_hollow(
        f"{MLX_LM}'s {name}",
        lambda values: module.Model(module.ModelArgs.from_dict(values)),
        config,
    )


def make_hollow(
    named: str, make: Callable[[dict[str, Any]], Any], config: Mapping[str, Any]
) -> Module:
    """Return what a library makes of a config, its weights being zeros without memory.

    named: the library's model, for the error.

    Raises:
        InvalidModel: the library refuses the config.
    """
    try:
        values = _plain(copy.deepcopy(dict(config)))  # it changes what it is given
        peer = make(values)
    except Exception as error:  # another library's: whatever it is, it is the config
        problem = f"{named} refuses this config: {_reason(error)}"
        raise InvalidModel(problem, file=CONFIG_FILE) from error
    peer.eval()
    _update(peer, {path: _zeros(array) for path, array in parameters_of(peer)})
    return cast("Module", peer)


def restore_model(
    name: str,
    config: Mapping[str, Any],
    stored: dict[str, mx.array],
    packings: Packings | None,
) -> Module:
    """Return a model that holds what is stored, lazily, packed where that is; raises as `fill`."""
    peer = hollow(name, config)
    steps = [peer.sanitize] if "sanitize" in dir(peer) else []
    return fill(peer, f"{MLX_LM}'s {name}", stored, packings, steps)


def fill(
    peer: Module,
    named: str,
    stored: dict[str, mx.array],
    packings: Packings | None,
    steps: Sequence[Callable[[dict[str, mx.array]], dict[str, mx.array]]],
) -> Module:
    """Put what is stored into a hollow model, lazily, packed where that is; return it.

    steps: by which the library turns stored tensors into its own, one after another.

    Raises:
        InvalidModel: some are missing, of no use, or of another shape than the config says.
    """
    try:
        weights = stored
        for step in steps:
            weights = step(weights)
        if packings is not None:
            _pack(peer, packings, weights)
        peer.load_weights(list(weights.items()), strict=True)
    except Exception as error:  # as above: its words name the tensors
        problem = f"{named} cannot take these tensors: {_reason(error)}"
        raise InvalidModel(problem) from error
    return peer


def observe_pass(
    peer: Module, caches: PeerCaches, say: Say | None = None, *, library: str = MLX_LM
) -> tuple[Leaves, mx.array]:
    """Return what a model remembers, and the logits of a pass that nobody evaluates.

    say: a pass over tokens [1, width] and caches; None: the model's own call.

    Raises:
        InvalidModel: the config makes a model that does not work, or a cache has no counterpart.
    """
    passes, logits = [], mx.zeros(())
    try:
        with without_compiling():
            for width in (NARROW_TOKENS, WIDE_TOKENS):
                kept = caches.module.make_prompt_cache(peer)
                tokens = mx.zeros((1, width), dtype=mx.int32)
                logits = peer(tokens, cache=kept) if say is None else say(tokens, kept)
                passes.append(kept)
    except Exception as error:
        name = type(peer).__module__.rpartition(".")[2]
        problem = f"{library}'s {name} cannot be run here: {_reason(error)}"
        raise InvalidModel(problem, file=CONFIG_FILE) from error
    return caches.leaves(*passes), logits


def arrays_of(peer: Module) -> dict[str, mx.array]:
    """Return all arrays that a model holds, its own tables included, each once."""
    tree = peer.filter_and_map(lambda _, __, value: isinstance(value, dict | list | mx.array))
    once = {id(array): name for name, array in reversed(_name_arrays(tree))}
    return {name: array for name, array in _name_arrays(tree) if once[id(array)] == name}


def packed_modules(peer: Module) -> dict[str, Packing]:
    """Return how modules are packed, by their paths; those that are not are left out."""
    packings, untyped = {}, cast("Any", peer)
    for path, module in untyped.named_modules():
        if "scales" in module:
            mode = PackingMode(str(module.mode))
            packings[path] = Packing(int(module.group_size), int(module.bits), mode)
    return packings


def unpack(peer: Module) -> None:
    """Turn modules that are packed into plain ones, lazily."""
    module_of("utils", package="mlx_lm").dequantize_model(peer)


def cast_weights(peer: Module, dtype: mx.Dtype) -> None:
    """Turn floating weights into `dtype`, but for those that the model wants exact."""
    exact = "cast_predicate" in dir(peer) and dtype != mx.float32
    wanted: Callable[[str], bool] = peer.cast_predicate if exact else bool  # any name is true
    arrays = {
        path: array.astype(dtype)
        for path, array in parameters_of(peer)
        if mx.issubdtype(array.dtype, mx.floating) and wanted(path)
    }
    _update(peer, arrays)


@contextmanager
def without_compiling() -> Iterator[None]:
    """On a CPU, run functions as they are that the peer compiles: that needs a C++ compiler."""
    if not runs_cpu() or os.environ.get("MLX_DISABLE_COMPILE"):
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def _pack(peer: Module, packings: Packings, stored: Mapping[str, mx.array]) -> None:
    """Make the modules packed ones whose weights are stored so."""

    def how(path: str, module: Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in stored or "to_quantized" not in dir(module):
            return False
        packing = packings.own.get(path, packings.common)
        if packing is None or not packing.stays:
            return False
        return layout_of(packing)

    from mlx.nn.layers.quantized import quantize  # noqa: PLC0415 - see above

    quantize(peer, class_predicate=how)


def _update(peer: Module, arrays: Mapping[str, mx.array]) -> None:
    peer.update(tree_unflatten(list(arrays.items())))


def parameters_of(peer: Module) -> list[tuple[str, mx.array]]:
    """Return the weights of a model with the paths to them."""
    return _name_arrays(cast("Any", peer).parameters())


def _name_arrays(tree: object) -> list[tuple[str, mx.array]]:
    """Return the arrays of a tree with the paths to them."""
    return cast("list[tuple[str, mx.array]]", tree_flatten(tree))


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:REASON_CHARS_MAX]}"


def _zeros(array: mx.array) -> mx.array:
    return mx.broadcast_to(mx.zeros((), dtype=array.dtype), array.shape)


def _plain(value: Any) -> Any:  # noqa: ANN401 - parsed JSON
    """Return JSON in which numbers that JSON has not are numbers again."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
