"""Small cases of the engine, worked out by hand on a model whose next token is known.

The numbers of faults are those of the table in docs/evidence/caches.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import FinishReason
from mlxd_worker.cache.base import RowId
from mlxd_worker.engine.sampling.sampler import Draw, sample
from mlxd_worker.models.base import Batch
from mlxd_worker.models.loader import inspect_model
from tests.support.engines import GREEDY, TinyEngine, tiny_engine
from tests.support.tiny_model import write_tiny_model
from tests.worker.made_tokenizers import EOS_ID
from tests.worker.tiny import (
    caches_of,
    config_with,
    ints,
    load,
    random_weights,
    write_config,
    write_model,
)

WIDTH = 64
VOCAB = 61
EOS = 5
ROW = RowId(0)
CHUNK = 8


class Digits:
    """Implements TextDecoder: a token's text is its number."""

    def push(self, token_id: int) -> str:
        """Return the number."""
        return str(token_id)

    def finish(self) -> str:
        """Hold nothing."""
        return ""


def chain_engine(folder: Path, **options: object) -> TinyEngine:
    """Return an engine on a Llama that answers each token with the next higher one.

    Its layers add nothing; embeddings are unit vectors, and the head knows each one's successor.
    """
    write_tiny_model(folder)  # for its tokenizer
    config = config_with(
        hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB
    )
    weights = random_weights(config)
    units = mx.eye(WIDTH)[:VOCAB]
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros_like(weights[name])
        if name.endswith("norm.weight"):
            weights[name] = mx.ones_like(weights[name])
    weights["model.embed_tokens.weight"] = units
    weights["lm_head.weight"] = 10 * mx.concatenate([units[-1:], units[:-1]])
    write_model(folder, config, weights)
    return tiny_engine(folder, make_decoder=lambda _: Digits(), **options)  # type: ignore[arg-type]


def test_a_chain_of_tokens_to_its_end(tmp_path: Path) -> None:
    """Of 1, 2, 3, 4, EOS: text "234", three tokens, EOS the reason, and no step beyond it."""
    tiny = chain_engine(tmp_path)
    _, sink = tiny.submit([1], max_tokens=50, eos_ids=frozenset({EOS}))
    steps = 0
    while tiny.engine.busy:
        tiny.engine.step()
        steps += 1

    assert (sink.text, sink.ids) == ("234", [2, 3, 4])
    assert sink.reason is FinishReason.EOS
    assert sink.finished.stop_token_id == EOS
    assert sink.finished.usage.completion_tokens == 3
    assert steps == 4  # 1, 2, 3 and 4 were evaluated; the end was not


def test_the_duration_of_a_prompt_is_that_of_its_whole_prefill(tmp_path: Path) -> None:
    """Fault 24: from its first chunk to the first token, every chunk between them included."""
    chunks = 9
    steps = 0
    tiny = chain_engine(tmp_path, chunk=CHUNK, clock=lambda: float(steps))
    _, sink = tiny.submit([1] * (chunks * CHUNK + 1), max_tokens=1, submitted_s=0.0)
    while tiny.engine.busy:
        steps += 1
        tiny.engine.step()

    assert sink.finished.usage.prompt_tokens == chunks * CHUNK + 1
    assert sink.finished.usage.prompt_s >= chunks - 1  # the last chunk's step draws, too


@pytest.mark.parametrize("token_id", [0, 255, 65_535, 65_536, 131_072])
def test_token_ids_keep_their_width(token_id: int) -> None:
    """Fault 28: an id of any size is the same drawn, on the host and in the next step's batch."""
    logits = mx.zeros((2, 131_073), dtype=mx.float32)
    logits[:, token_id] = 9.0
    drawn = sample(logits, [Draw(GREEDY, 0), Draw(GREEDY, 1)])

    assert ints(drawn) == [token_id] * 2
    assert Batch.decode(drawn, [0, 0], []).tokens.tolist() == [[token_id]] * 2
    assert Batch.prefill([token_id], 0, ROW).tokens.dtype == mx.int32


@pytest.mark.parametrize("form", [FloatType.BF16, FloatType.F16])
def test_scalars_promote_no_activations(form: FloatType, tmp_path: Path) -> None:
    """Fault 29: what a model in half precision hands on from layer to layer stays that."""
    model = load(write_model(tmp_path, config_with(rms_norm_eps=1e-5)), form)
    caches = caches_of(model)
    caches.join(ROW, tokens=4)
    hidden = model.forward(Batch.prefill([1, 2, 3, 4], 0, ROW), caches)

    assert hidden.dtype == model.parameters()["lm_head.weight"].dtype != mx.float32
    assert model.logits(hidden).dtype == mx.float32


def test_an_end_that_is_the_first_token(tmp_path: Path) -> None:
    """A prompt whose answer is EOS at once has no text and no tokens."""
    sink = chain_engine(tmp_path).alone([EOS_ID, 3, 4], eos_ids=frozenset({EOS}))

    assert (sink.text, sink.ids, sink.reason) == ("", [], FinishReason.EOS)


@pytest.mark.parametrize("marked", [True, False])
def test_scales_and_biases_in_either_order_are_refused_alike(
    tmp_path: Path, *, marked: bool
) -> None:
    """Fault 26: scales that belong to no packed weight are named, whatever their order in the file.

    With `quantization` in the config too: rows of 48 values are not packed in groups of 32.
    """
    config = config_with(quantization={"bits": 4, "group_size": 32} if marked else None)
    name = "model.layers.0.mlp.down_proj"
    errors = []
    for order in ((".scales", ".biases"), (".biases", ".scales")):
        folder = write_model(tmp_path / order[0], config_with())
        write_config(folder, config)
        file = folder / "model.safetensors"
        file.write_bytes(with_tensors(file.read_bytes(), [name + suffix for suffix in order]))
        with pytest.raises(InvalidModel) as caught:
            inspect_model(folder)
        errors.append(caught.value)

    assert str(errors[0]) == str(errors[1])
    assert errors[0].field == f"{name}.biases"


def with_tensors(content: bytes, names: list[str]) -> bytes:
    """Return a safetensors file with one more float32 for each name, in this order."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    body = content[8 + size :]
    for name in names:
        place = [len(body), len(body) + 4]
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": place}
        body += bytes(4)
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + body
