"""What is said of a small model of every family before it is loaded: a table that is committed.

`python -m tests.support.described` writes it anew; a change of it is a change of what plans reckon.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from mlxd_controller.store.folder import read_folder
from mlxd_models.describe import Description, describe
from mlxd_models.families.registry import REGISTRY
from mlxd_models.fit.planner import plan_load
from mlxd_shared.domain.requests import LoadSpec, Weights
from mlxd_worker.proof.families import config_of
from tests.support.made_weights import write_weights
from tests.support.model_facts import device
from tests.support.seeing import write_image_settings
from tests.support.seeing_shapes import write_shaped_settings

TABLE: Final = Path(__file__).parents[1] / "data" / "described.json"
CONTEXT, ROWS = 512, 2
STORED: Final = ("float32", "4-bit")

SIZES: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def write_described(folder: Path, architecture: str, stored: str) -> Path:
    """Write the model of a row; return its folder."""
    config = config_of(architecture, SIZES)
    sight = REGISTRY[architecture].footprint(REGISTRY[architecture].parse(config)).sight
    write_weights(folder, config, stored=stored)
    if sight is None:
        return folder
    write = write_shaped_settings if sight.varies else write_image_settings
    return write(folder, sight.side)


def said_of(folder: Path) -> dict[str, Any]:
    """Return what is said of a model: tensors, sizes, and the bytes of plans by form and term."""
    described, facts = describe(folder), read_folder(folder).facts
    plans = {
        weights.value: plan_load(
            facts, LoadSpec(CONTEXT, ROWS, weights, prefix_cache_nbytes=0), device(1 << 10)
        )
        for weights in (Weights.STORED, Weights.FLOAT32)
    }
    terms = ("weights", "kv", "activations")
    return {
        "tensors": _tensors(described),
        "values": described.weight_values,
        "stored_bytes": facts.stored_bytes,
        "context_max": facts.context_length_max,
        "caches": json.loads(json.dumps(asdict(facts.caches))),
        "passes": asdict(facts.passes),
        "plans": {
            form: {term.name: term.nbytes for term in plan.terms if term.name in terms}
            for form, plan in plans.items()
        },
    }


def _tensors(described: Description) -> dict[str, int]:
    """Return how many tensors there are, and how many of them are made with others at once."""
    required = [spec for spec in described.specs if spec.required]
    return {"stored": len(described.facts), "joined": sum(bool(spec.joins) for spec in required)}


def table() -> dict[str, dict[str, Any]]:
    """Return the table as it is committed."""
    rows: dict[str, dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return rows


def _make_table() -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as root:
        return {
            name: {
                stored: said_of(write_described(Path(root) / name / stored, name, stored))
                for stored in STORED
            }
            for name in sorted(REGISTRY)
        }


if __name__ == "__main__":
    TABLE.write_text(json.dumps(_make_table(), indent=1) + "\n", encoding="utf-8")
