"""How weights are packed: one setting for all, and those of single weights."""

from __future__ import annotations

from mlxd_models.families.common.packing import Packing, PackingMode
from mlxd_models.families.llama import parse_llama
from tests.worker.tiny import config_with


def test_packings_of_their_own() -> None:
    """A weight named in `quantization` has its own setting, or none; the others the common one."""
    own = {"lm_head": {"bits": 8, "group_size": 32}, "a": True, "b": False}
    config = parse_llama(config_with(quantization={"bits": 4, "group_size": 64, **own}))
    assert config.packing is not None

    packings = {stem: config.packing.of(stem, inputs=64) for stem in ("lm_head", "a", "b", "c")}

    assert packings == {
        "lm_head": Packing(32, 8), "a": Packing(64, 4), "b": None, "c": Packing(64, 4),
    }  # fmt: skip
    assert config.packing.of("c", inputs=96) is None


def test_a_setting_of_its_own_is_affine_unless_it_says_otherwise() -> None:
    """What one weight's setting leaves out is MLX's default for its mode, not the common one."""
    own = {"a": {"bits": 8}, "b": {"mode": "nvfp4"}, "c": {"group_size": 32, "bits": 8}}
    common = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    config = parse_llama(config_with(quantization={**common, **own}))
    assert config.packing is not None

    packings = {stem: config.packing.of(stem, inputs=64) for stem in "abcd"}

    assert packings == {
        "a": Packing(64, 8),
        "b": Packing(16, 4, PackingMode.NVFP4),
        "c": Packing(32, 8),
        "d": Packing(32, 4, PackingMode.MXFP4),
    }
