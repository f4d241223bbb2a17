"""Write the model folder: the Hugging Face layout, bfloat16, and training.json beside it."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from demo_training.chats.answers import SEED, TEMPERATURE, TOP_P, Judgement, answers, judge
from demo_training.chats.requests import (
    SAMPLE_EVERY,
    held_out_names,
    judged_requests,
    sample_of_requests,
)
from demo_training.corpus import HELD_OUT_MODULUS, Story
from demo_training.evaluate import Score, evaluate, sample_of
from demo_training.forward import Parameters
from demo_training.overlap import SPAN_CHARS, SPAN_LETTERS
from demo_training.prepared import Prepared
from demo_training.shape import Shape
from demo_training.tokens import BOUNDARY_ID, TURN_END_ID, write_tokenizer
from demo_training.train import Outcome, Recipe

FOLDER_NBYTES_MAX = 12_000_000
TRAINING_FILE = "training.json"


def write_model(folder: Path, prepared: Prepared, shape: Shape, outcome: Outcome) -> None:
    """Write config, tokenizer and weights; the dtype of every tensor is bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", shape.config(BOUNDARY_ID))
    generation = {
        "bos_token_id": BOUNDARY_ID,
        "eos_token_id": [BOUNDARY_ID, TURN_END_ID],
        "do_sample": True,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
    }
    _write_json(folder / "generation_config.json", generation)
    write_tokenizer(prepared.tokenizer, folder, context=shape.max_position_embeddings)
    weights = {name: outcome.parameters[name].astype(mx.bfloat16) for name in shape.tensors()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})


def write_facts(
    folder: Path,
    prepared: Prepared,
    shape: Shape,
    recipe: Recipe,
    stages: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """Write training.json: what the folder was made from and how; `record_scores` adds to it.

    `stages` are the facts of the runs on stories alone and on stories and chats.
    """
    facts: dict[str, Any] = {
        "corpus": {
            "sha256": prepared.corpus_sha256,
            "stories_trained": prepared.stories_trained,
            "tokens": len(prepared.stream),
            "chats": prepared.chats,
            "chat_windows": len(prepared.chat_windows),
            "held_out_rule": f"sha256(title) mod {HELD_OUT_MODULUS} is 0",
            "overlap_rule": f"{SPAN_CHARS} characters, or {SPAN_LETTERS} letters and digits",
            "removed": asdict(prepared.removal),
        },
        "recipe": asdict(recipe),
        "shape": asdict(shape) | {"parameters": _parameters(shape)},
        "run": stages[0],
        "chat_run": stages[1],
        "versions": {name: version(name) for name in ("mlx", "tokenizers", "numpy")}
        | {"python": platform.python_version()},
    }
    _write_json(folder / TRAINING_FILE, facts)


def run_facts(outcome: Outcome) -> dict[str, Any]:
    """Return what training.json says of one run."""
    return {
        "steps": outcome.steps,
        "tokens_seen": outcome.tokens_seen,
        "seconds": round(outcome.seconds, 1),
        "device": str(mx.device_info().get("device_name", "CPU")),
        "final_training_loss": outcome.curve[-1].training_loss,
        "curve": [asdict(mark) for mark in outcome.curve if mark.held_out_loss is not None],
    }


def read_stage(folder: Path, shape: Shape) -> tuple[Parameters, dict[str, Any]]:
    """Return the float32 weights of a written folder, and the facts of its run on stories."""
    stored = mx.load(str(folder / "model.safetensors"))
    assert isinstance(stored, dict)
    parameters = {name: stored[name].astype(mx.float32) for name in shape.tensors()}
    facts = json.loads((folder / TRAINING_FILE).read_text(encoding="utf-8"))
    stage: dict[str, Any] = facts["run"]
    return parameters, stage


def recorded_names(folder: Path) -> tuple[str, ...]:
    """Return whom the folder's requests named when `record_scores` judged it."""
    facts = json.loads((folder / TRAINING_FILE).read_text(encoding="utf-8"))
    return tuple(facts["held_out_names"])


def record_scores(folder: Path, held_out: Sequence[Story]) -> tuple[Score, Judgement]:
    """Score the folder on all held-out text, on the sample and on requests; training.json has all.

    Raises:
        FileNotFoundError: the folder has no training.json yet.
    """
    full, sample = evaluate(folder, held_out), evaluate(folder, sample_of(held_out))
    names = held_out_names([story.text for story in held_out])
    requests = judged_requests(names)
    written = answers(folder, requests)
    judgement = judge(requests, written)
    facts = json.loads((folder / TRAINING_FILE).read_text(encoding="utf-8"))
    facts["bits_per_byte"] = round(full.bits_per_byte, 4)
    facts["held_out"] = _score(full)
    facts["held_out_sample"] = _score(sample)
    facts["held_out_requests"] = asdict(judgement) | {"seed": SEED}
    of_sample = judge(sample_of_requests(requests), written[::SAMPLE_EVERY])
    facts["held_out_requests_sample"] = asdict(of_sample)
    facts["held_out_names"] = list(names)
    facts["held_out_titles"] = sorted(story.title for story in held_out)
    _write_json(folder / TRAINING_FILE, facts)
    return full, judgement


def folder_nbytes(folder: Path) -> int:
    """Return the size of all files in the folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _score(score: Score) -> dict[str, Any]:
    return asdict(score) | {"bits_per_byte": score.bits_per_byte}


def _parameters(shape: Shape) -> int:
    total = 0
    for dims in shape.tensors().values():
        count = 1
        for extent in dims:
            count *= extent
        total += count
    return total


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
