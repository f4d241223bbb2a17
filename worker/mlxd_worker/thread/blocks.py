"""Opens the blocks of a loaded model: their form, their folder, their threads.

Invariants:
- Engine thread, like everything that makes a model resident.
- If the folder cannot be used the model is served without it, and one line is logged.
- With a key, what the same model has left there in the clear goes, in whatever form: whoever sets
  one wants none.
"""

from __future__ import annotations

from pathlib import Path

from mlxd_shared.blocks.about import TEXT_CHARS_MAX, About
from mlxd_shared.blocks.block_file import HEADER_NBYTES_MAX
from mlxd_shared.blocks.chain import BLOCK_TOKENS, Form, name_of_form
from mlxd_shared.blocks.folder import LOCK_WAIT_S, FolderRefused, open_folder, remove_clear_folders
from mlxd_shared.blocks.store import BlockStore
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.ops.logs import get_logger
from mlxd_worker.cache.base import Kind, LayerCache
from mlxd_worker.cache.disk.prefixes import PrefixDisk
from mlxd_worker.cache.disk.shapes import BlockShapes, describe_layers
from mlxd_worker.cache.disk.tier import BlockTier
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.thread.facts import DiskFolder

_log = get_logger("prefix disk")


def open_blocks(
    folder: DiskFolder,
    caches: RowCaches,
    *,
    name: str = "",
    digest: str,
    weights: str,
    context_length: int,
    device: DeviceKind,
    library: str,
    block_tokens: int = BLOCK_TOKENS,
) -> PrefixDisk | None:
    """Return the store for blocks of a model's prompts; None if it has none, or no usable folder.

    name: the model's, for people. weights: how they are kept in memory. library: what computes,
    with its version. Whoever gets it closes its tier.
    """
    layers: dict[Kind, list[LayerCache]] = {}
    for layer in caches.layers:
        if layer is not None:
            layers.setdefault(layer.kind, []).append(layer)
    if not layers or not digest:
        return None
    shapes = BlockShapes(layers, block_tokens=block_tokens)
    form = Form(
        model_digest=digest,
        weights=weights,
        context_length=context_length,
        device=device.value,
        library=library,
        layers=describe_layers(caches.layers),
        block_tokens=block_tokens,
    )
    key = folder.key
    form_name = name_of_form(form, name_key=b"" if key is None else key.name_key)
    try:
        store = BlockStore(
            open_folder(folder.path, form_name, wait_s=LOCK_WAIT_S, key=key),
            form_name,
            budget_nbytes=folder.budget_nbytes,
            file_nbytes_max=shapes.nbytes_max + HEADER_NBYTES_MAX,
            check=shapes.check,
        )
    except FolderRefused as refused:
        _log.warning("prefixes are not kept on disk", reason=str(refused))
        return None
    if key is not None:
        _remove_clear(folder.path, form, model=name)
    _log.info(
        "prefixes on disk",
        files=len(store),
        nbytes=store.nbytes,
        folder=str(folder.path),
        encrypted=store.encrypted,
    )
    store.describe(
        About(
            model=name[:TEXT_CHARS_MAX],
            digest=digest,
            weights=weights,
            context_length=context_length,
            device=device.value,
            library=library,
            block_s=store.about.block_s,
            key="" if key is None else key.id.hex(),
        )
    )
    return PrefixDisk(BlockTier(store), shapes)


def _remove_clear(root: Path, form: Form, *, model: str) -> None:
    """Remove what a model has left in the clear, in this form or another, and say so."""
    gone = remove_clear_folders(root, name_of_form(form), digest=form.model_digest)
    if gone:
        _log.warning("removed blocks in the clear", model=model, count=gone, folder=str(root))
