"""Every family: what is said of a model before it is loaded is what is committed, and is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_models.families.registry import REGISTRY
from mlxd_models.sizes.pass_sizes import reads_passes
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_worker.models.loader import inspect_model, load_model
from tests.support.described import CONTEXT, STORED, said_of, table, write_described
from tests.worker.tiny import ignore_progress


def test_every_family_has_a_row() -> None:
    """One for each form that weights are stored in, and there is no other."""
    assert {name: tuple(forms) for name, forms in table().items()} == dict.fromkeys(
        sorted(REGISTRY), STORED
    )


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("architecture", REGISTRY)
def test_a_load_takes_what_was_said(architecture: str, stored: str, tmp_path: Path) -> None:
    """Tensors, bytes, caches and plans are the table's; weights and caches take them to the byte,
    both as they are stored and as float32."""
    folder = write_described(tmp_path, architecture, stored)
    row = table()[architecture][stored]

    assert said_of(folder) == row

    files = inspect_model(folder)
    for form, number in (("stored", files.stored), ("float32", FloatType.F32)):
        packed = form == "stored" and files.packed
        model = load_model(files, form=number, progress=ignore_progress, packed=packed)
        named = {name: window for name, window in model.parameters().items() if "rope" not in name}
        taken = sum(array.nbytes for array in named.values())
        assert taken == row["plans"][form]["weights"], form
        assert (model.vocab_size, model.context_max) == (row["passes"]["vocab"], row["context_max"])
        layers = model.new_caches(context_max=CONTEXT)
        caches = [cache for cache in layers if cache is not None]
        said = files.footprint.caches
        keeps_all = all(cache is not None and cache.kind.sliceable for cache in layers)
        # As the engine decides it (`reads_together`): what the fit reckons a GPU's passes by.
        by_passes = model.capabilities.reads_chunks and keeps_all
        assert reads_passes(files.footprint.passes, said) is by_passes
        windows = sum(window.window * window.kv_values_per_token for window in said.windows)
        positions = CONTEXT * said.kv_values_per_token + windows
        states = 4 * said.recurrent_values_per_row
        held = sum(cache.slot_nbytes(CONTEXT) for cache in caches)
        most = number.nbytes * positions + states
        # A state's last inputs live in the model's form, and are said to be float32.
        assert held == most if number is FloatType.F32 or not states else 0 < most - held < states
