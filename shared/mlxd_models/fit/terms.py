"""The terms of a plan's need, each reckoned from what a model's files state. Pure."""

from __future__ import annotations

from mlxd_models.families.common.packing import ON_LOAD
from mlxd_models.fit import plan
from mlxd_models.fit.facts import ModelFacts
from mlxd_models.sizes.arena_sizes import kv_tokens_bound
from mlxd_models.sizes.cache_sizes import rows_unpacked
from mlxd_models.sizes.pass_sizes import reads_passes
from mlxd_models.sizes.weight_forms import AS_NUMBERS, FloatType
from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.requests import KVFormat, Weights
from mlxd_shared.domain.units import format_bytes

PROCESS_BYTES = 91 * config.MIB
"""A worker beside its arrays, its tokenizer apart: interpreter, MLX, BLAS, gRPC. Measured with
a model of 0.4 MB, after a stream: 94.3 to 95.5 MB in four runs; before it holds a model, 80.3. The
same code held 7 MB less on another machine: it is what kernel and libraries make of it (0026)."""
WIDENING_BYTES = 12 * config.MIB
"""NumPy, which a worker needs where weights are widened as they are read. Measured: 11.9 to 13.6
MB at the peak."""

HEAP_BYTES = config.OWN_MAPPING_NBYTES
"""What the C heap keeps between blocks that live: larger ones are mappings of their own (0026)."""

CUDA_CONTEXT_BYTES = 600 * config.MIB
"""What the driver keeps of a GPU for each process: context, kernels, workspaces. Measured on one
H200: 518 MiB after a first array, 590 after streams. The process itself is not on the GPU."""

TOKENIZER_FACTOR = 13
"""Of a tokenizer for each byte of its tokenizer.json: 6.8 (GPT-NeoX) to 12.5 (Mistral v3; 0045)."""


def reckon(facts: ModelFacts, device: plan.Device, choice: plan.Choice) -> plan.Plan:
    """Return the plan with exactly these choices, whether it fits or not; of ranks one's part."""
    facts = facts.of_ranks(choice.ranks)
    form = form_of_numbers(choice.weights, on_cpu=device.on_cpu)
    item_bytes = facts.item_bytes if form is None else form.nbytes
    kv = _kv(facts, choice, item_bytes=item_bytes, on_cpu=device.on_cpu)
    beside_bytes = kv.nbytes + (choice.prefix_bytes or 0)
    rest = (
        _weights(facts, choice.weights, item_bytes=item_bytes),
        kv,
        _activations(facts, device, choice, item_bytes=item_bytes, beside_bytes=beside_bytes),
        _pool(facts, device, choice, item_bytes=item_bytes),
        _process(facts, device, choice),
    )
    free_bytes = device.budget_bytes - sum(term.nbytes for term in rest)
    prefix = _prefix(device, choice, free_bytes=free_bytes)
    devices = device.members or (device.name,) * choice.ranks
    return plan.Plan(devices, choice, (*rest[:2], prefix, *rest[2:]))


def form_of_numbers(weights: Weights, *, on_cpu: bool) -> FloatType | None:
    """Return what weights that are not packed live in; None: in what they are stored in.

    Beside weights packed while loading, too, what is multiplied is fastest in float32 on a CPU.
    """
    return FloatType.F32 if weights in ON_LOAD and on_cpu else AS_NUMBERS.get(weights)


def _weights(facts: ModelFacts, weights: Weights, *, item_bytes: int) -> plan.Term:
    stored_bytes = facts.stored_bytes - facts.dropped_bytes
    if weights is Weights.STORED:
        return plan.Term(plan.WEIGHTS_TERM, stored_bytes, "as stored")
    if weights in ON_LOAD:
        made = facts.packed_on_load(weights)
        plain = facts.elements - facts.packed_values - made.values + facts.packed_scales
        nbytes = made.nbytes(item_bytes) + plain * item_bytes + facts.packed_bytes
        note = f"{made.values:,} values packed as {weights.value}"
        if nbytes > stored_bytes:  # tables are kept, and on a CPU widened
            note += f": more than the {format_bytes(stored_bytes)} as stored"
        return plan.Term(plan.WEIGHTS_TERM, nbytes, note)
    note = f"{facts.elements:,} values as {weights.value}"
    exact_nbytes = facts.exact_values * (FloatType.F32.nbytes - item_bytes)
    return plan.Term(plan.WEIGHTS_TERM, facts.elements * item_bytes + exact_nbytes, note)


def _kv(facts: ModelFacts, choice: plan.Choice, *, item_bytes: int, on_cpu: bool) -> plan.Term:
    context, rows, caches = choice.context_length, choice.rows_max, facts.caches
    held = caches.most_held(
        context_max=context, rows_max=rows, kv_format=choice.kv_format, on_cpu=on_cpu
    )
    tokens = kv_tokens_bound(context, rows)
    form = "" if choice.kv_format is KVFormat.MODEL else f" as {choice.kv_format.value}"
    parts = [f"{tokens} tokens x {caches.kv_values_per_token} values{form}"]
    parts += [
        f"{layers.kv_values_per_token} values in a window of {layers.window}"
        for layers in caches.windows
    ]
    if caches.recurrent_values_per_row:
        parts.append(f"states of {caches.recurrent_values_per_row} float32 values a row")
    if caches.foreign:
        parts.append("at most: what mlx-lm's layers keep is known when the worker has the model")
    return plan.Term(plan.KV_TERM, held.nbytes(item_bytes), ", ".join(parts))


def _prefix(device: plan.Device, choice: plan.Choice, *, free_bytes: int) -> plan.Term:
    if choice.prefix_bytes is not None:
        note = "as asked for" if choice.prefix_bytes else "no prefix is to be kept"
        return plan.Term(plan.PREFIX_TERM, choice.prefix_bytes, note)
    wanted = int(device.budget_bytes * device.prefix_fraction)
    note = f"{device.prefix_fraction:.0%} of the device's memory"
    if wanted <= free_bytes:
        return plan.Term(plan.PREFIX_TERM, wanted, note)
    return plan.Term(plan.PREFIX_TERM, max(0, free_bytes), f"what is left of {note}")


def _activations(
    facts: ModelFacts,
    device: plan.Device,
    choice: plan.Choice,
    *,
    item_bytes: int,
    beside_bytes: int,
) -> plan.Term:
    """Widest moment of a pass, or of putting a tensor together while nothing else is there yet.

    Quantised keys and values are unpacked to be read: on Metal one prompt's, elsewhere all rows'.
    Weights that stay packed are unpacked for a prompt, a few layers' at a time.
    """
    context = choice.context_length
    nbytes = facts.passes.nbytes(
        facts.caches,
        context=context,
        rows=choice.rows_max,
        item_nbytes=item_bytes,
        on_cpu=device.on_cpu,
    )
    read = kv_tokens_bound(context, rows_unpacked(choice.rows_max, device.kind))
    unpacked = facts.caches.unpacked_values(read, choice.kv_format)
    unpacked += facts.unpacked_of(choice.weights)
    nbytes += unpacked * item_bytes
    seen = ""
    if facts.sight is not None:  # images are seen before a pass begins
        kept = facts.sight.kept_nbytes(item_bytes)
        seeing = facts.sight.seeing_nbytes(item_bytes, on_cpu=device.on_cpu)
        nbytes = max(nbytes, seeing) + kept
        seen = f", with features of {config.IMAGE_FEATURES_KEPT_MAX} images"
    making = max((taken.beyond_in(choice.weights, item_bytes) for taken in facts.taken), default=0)
    if making - beside_bytes > nbytes:
        return plan.Term(
            plan.ACTIVATIONS_TERM, making - beside_bytes, "putting a tensor together while loading"
        )
    by_passes = not device.on_cpu and reads_passes(facts.passes, facts.caches)
    most = config.PREFILL_PASS_TOKENS if by_passes else config.PREFILL_CHUNK_TOKENS
    note = f"a prefill of {min(most, context)} tokens against a context of {context}{seen}"
    return plan.Term(plan.ACTIVATIONS_TERM, nbytes, note)


def _pool(
    facts: ModelFacts, device: plan.Device, choice: plan.Choice, *, item_bytes: int
) -> plan.Term:
    nbytes = facts.passes.pool_nbytes(
        facts.elements,
        rows=choice.rows_max,
        item_nbytes=item_bytes,
        on_cuda=device.kind is DeviceKind.CUDA,
    )
    return plan.Term(plan.POOL_TERM, nbytes, "freed memory that is kept for reuse")


def _process(facts: ModelFacts, device: plan.Device, choice: plan.Choice) -> plan.Term:
    if device.holds_process:
        return plan.Term(plan.PROCESS_TERM, 0, "there already")
    if device.kind is DeviceKind.CUDA:
        return plan.Term(plan.PROCESS_TERM, CUDA_CONTEXT_BYTES, "the driver's context of a process")
    nbytes = PROCESS_BYTES + HEAP_BYTES + TOKENIZER_FACTOR * facts.tokenizer_bytes
    if choice.weights is Weights.FLOAT32 and facts.item_bytes < FloatType.F32.nbytes:
        nbytes += WIDENING_BYTES
    note = "interpreter, libraries, heap and tokenizer"
    if facts.sight is not None:
        nbytes += facts.sight.reading_nbytes(choice.rows_max)
        note = "interpreter, libraries, heap, tokenizer, and images that are decoded"
    return plan.Term(plan.PROCESS_TERM, nbytes, note)
