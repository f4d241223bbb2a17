"""The embedded demo model is what its own papers say: shape, tokens, size, held-out figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template
from safetensors import safe_open
from tokenizers import Tokenizer

from demo_training.chats.packing import render
from demo_training.corpus import held_out_stories, is_held_out
from demo_training.export import FOLDER_NBYTES_MAX, folder_nbytes
from demo_training.shape import Shape
from demo_training.tokens import (
    BOUNDARY,
    BOUNDARY_ID,
    SPECIAL_TOKENS,
    TURN_END_ID,
    VOCABULARY,
    tokenizer_config,
)
from tests.real_inputs import REAL_INPUTS, real_input

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "shared" / "mlxd_shared" / "demo_model"
BITS_PER_BYTE_MAX = 1.40
SCORING_S_MAX = 150
ENDED_SHARE_MIN = 0.95
NAMED_SHARE_MIN = 0.80
"""Also of the 67 that are sampled anew. Sums round differently from one machine to another, and an
answer that parts from the recorded one at any token is another draw: a few of 67 more or less,
where 97 % are named."""
TEXTS = (
    "Once upon a time",
    'He said: "No!"\n\nAnd they  went\thome. ',
    "naïve café, Æsop, 日本語, 👩‍🚀 and \x00 too",
    " leading and trailing ",
    "",
)


def read(name: str) -> dict[str, Any]:
    """Read one of the folder's JSON files."""
    content: dict[str, Any] = json.loads((DEMO / name).read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The shipped tokenizer."""
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_the_folder_is_small() -> None:
    """All files together keep to 12 MB, card and papers included."""
    assert folder_nbytes(DEMO) <= FOLDER_NBYTES_MAX == 12_000_000


def test_the_config_is_of_the_trained_shape() -> None:
    """config.json says what the training code built, and what training.json recorded."""
    shape = Shape()
    recorded = read("training.json")["shape"]

    assert read("config.json") == shape.config(BOUNDARY_ID)
    assert read("config.json")["architectures"] == ["LlamaForCausalLM"]
    assert recorded["hidden_size"] == shape.hidden_size
    assert 3_000_000 <= recorded["parameters"] <= 8_000_000


def test_the_tensors_are_those_of_the_config() -> None:
    """Every tensor the config implies is there, in its shape, in bfloat16, and no other."""
    with safe_open(DEMO / "model.safetensors", framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        types = {part.get_dtype() for part in slices.values()}

    assert shapes == Shape().tensors()
    assert types == {"BF16"}


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    """Any text is encoded without loss, behind the one boundary token."""
    ids = tokenizer.encode(text).ids

    assert ids[0] == BOUNDARY_ID
    assert tokenizer.decode(ids) == text


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    """No character falls outside the vocabulary: bytes are the floor of the merges."""
    rare = "".join(chr(code) for code in range(0x80, 0xD800, 97))
    ids = tokenizer.encode(rare, add_special_tokens=False).ids

    assert max(ids) < VOCABULARY == tokenizer.get_vocab_size()
    assert tokenizer.decode(ids) == rare


def test_one_token_begins_and_ends_a_text(tokenizer: Tokenizer) -> None:
    """All three configurations name the same token as BOS and EOS; a turn's end ends too."""
    generation = read("generation_config.json")

    assert tokenizer.token_to_id(BOUNDARY) == BOUNDARY_ID
    assert generation["bos_token_id"] == BOUNDARY_ID
    assert generation["eos_token_id"] == [BOUNDARY_ID, TURN_END_ID]
    assert read("tokenizer_config.json") == tokenizer_config(Shape().max_position_embeddings)


def test_a_chats_tokens_are_its_own(tokenizer: Tokenizer) -> None:
    """Each special token is one id, which no text without it is encoded to."""
    for token_id, token in SPECIAL_TOKENS.items():
        assert tokenizer.encode(token, add_special_tokens=False).ids == [token_id]
    plain = tokenizer.encode("im_start|> <|im_ end", add_special_tokens=False).ids
    assert not set(plain) & set(SPECIAL_TOKENS)


def test_training_chats_are_what_the_template_writes() -> None:
    """The model was trained on the very text that its template makes of a conversation."""
    settings = read("tokenizer_config.json")
    turns = (("system", "Be brief."), ("user", "A fox?"), ("assistant", "Ran."), ("user", "Go on."))
    messages = [{"role": role, "content": content} for role, content in turns]
    template = Template(settings["chat_template"])
    named = {"messages": messages, "bos_token": settings["bos_token"]}

    assert template.render(**named) == render(turns)
    assert template.render(**named, add_generation_prompt=True) == render(turns, asks=True)


def test_the_papers_name_the_figure() -> None:
    """training.json and the card give one held-out figure, and it is good enough."""
    facts = read("training.json")
    card = (DEMO / "MODEL_CARD.md").read_text(encoding="utf-8")

    assert facts["bits_per_byte"] <= BITS_PER_BYTE_MAX
    assert facts["held_out"]["bits_per_byte"] == pytest.approx(facts["bits_per_byte"], abs=1e-4)
    assert f"{facts['bits_per_byte']:.4f} bits a byte" in card
    assert f"seed {facts['recipe']['seed']}" in card
    assert all(is_held_out(title) for title in facts["held_out_titles"])
    assert facts["held_out"]["stories"] == len(facts["held_out_titles"])
    requests = facts["held_out_requests"]
    assert f"{requests['named']} of {requests['requests']} requests" in card
    assert f"{requests['ended']} answers" in card
    assert requests["named"] >= NAMED_SHARE_MIN * requests["requests"]
    assert f"{len(facts['held_out_names'])} people" in card
    assert requests["ended"] >= ENDED_SHARE_MIN * requests["requests"]


def score_anew(what: str) -> dict[str, Any]:
    """Score the shipped file anew; the corpus is there."""
    real_input("corpus", "stories.jsonl.xz")
    command = [sys.executable, "tools/train_demo_model.py", "--data", str(REAL_INPUTS)]
    done = subprocess.run(
        [*command, "--out", str(DEMO), what],
        cwd=ROOT, capture_output=True, text=True, timeout=SCORING_S_MAX, check=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # beside other tests, threads only wait
    )  # fmt: skip
    score: dict[str, Any] = json.loads(done.stdout)
    return score


@pytest.mark.soak
def test_the_figure_is_that_of_the_file() -> None:
    """Scoring the held-out sample anew, from the shipped file, gives the recorded figure."""
    recorded, score = read("training.json")["held_out_sample"], score_anew("--evaluate-sample")

    assert score["text_nbytes"] == recorded["text_nbytes"]
    assert score["targets"] == recorded["targets"]
    assert score["bits"] == pytest.approx(recorded["bits"], rel=1e-4)


@pytest.mark.soak
def test_answers_are_those_of_the_file() -> None:
    """The sampled requests, answered anew by the shipped file, name whom they should, and end."""
    recorded = read("training.json")["held_out_requests_sample"]
    score = score_anew("--evaluate-requests")

    assert score["requests"] == recorded["requests"]
    assert score["ended"] >= ENDED_SHARE_MIN * score["requests"]
    assert score["named"] >= NAMED_SHARE_MIN * score["requests"]


def test_the_held_out_stories_are_those_of_the_rule() -> None:
    """The recorded titles are the corpus's titles that the rule holds out, every one."""
    real_input("corpus", "stories.jsonl.xz")
    titles = sorted(story.title for story in held_out_stories(REAL_INPUTS))

    assert read("training.json")["held_out_titles"] == titles
