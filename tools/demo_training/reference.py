"""An independent reader of the shipped file: plain numpy, float32, no MLX.

It reads only what is in the folder (config.json, model.safetensors, tokenizer.json), so a
figure computed with it is a figure of the file.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reference:
    """The model of one folder, ready to score text."""

    config: dict[str, Any]
    tensors: dict[str, Rows]

    @classmethod
    def load(cls, folder: Path) -> "Reference":
        """Read the folder; every tensor is widened to float32."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(config, read_safetensors(folder / "model.safetensors"))

    @property
    def context(self) -> int:
        """Most tokens the model takes."""
        return int(self.config["max_position_embeddings"])

    def logits(self, ids: Integers, *, rows_from: int = 0) -> Rows:
        """Return next-token logits `[length - rows_from, vocabulary]` for one sequence."""
        count, tensors = self.config["num_hidden_layers"], self.tensors
        hidden = tensors["model.embed_tokens.weight"][ids]
        cos, sin = self._rotation(len(ids))
        for layer in range(count):
            name = f"model.layers.{layer}"
            normed = self._norm(f"{name}.input_layernorm", hidden)
            hidden = hidden + self._attention(f"{name}.self_attn", normed, cos, sin)
            hidden = hidden + self._mlp(name, hidden)
        hidden = self._norm("model.norm", hidden[rows_from:])
        scores: Rows = hidden @ tensors["model.embed_tokens.weight"].T
        return scores

    def next_logits(self, ids: Integers, cache: "Cache", position: int) -> Rows:
        """Return logits `[rows, vocabulary]` for the tokens at `position`, one a row.

        All rows are sequences of their own; the cache holds what came before and takes these.
        """
        tensors, width = self.tensors, self.config["head_dim"]
        hidden = tensors["model.embed_tokens.weight"][ids]
        cos, sin = self._rotation(position + 1)
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            normed = self._norm(f"{name}.input_layernorm", hidden)
            queries, keys, values = (
                self._linear(f"{name}.self_attn.{part}_proj", normed).reshape(len(ids), -1, width)
                for part in "qkv"
            )
            queries, keys = (_rotate(part, cos[-1], sin[-1]) for part in (queries, keys))
            mixed = cache.attend(layer, position, queries, keys, values)
            hidden = hidden + self._linear(f"{name}.self_attn.o_proj", mixed)
            hidden = hidden + self._mlp(name, hidden)
        hidden = self._norm("model.norm", hidden)
        scores: Rows = hidden @ tensors["model.embed_tokens.weight"].T
        return scores

    def _mlp(self, name: str, hidden: Rows) -> Rows:
        normed = self._norm(f"{name}.post_attention_layernorm", hidden)
        gate = self._linear(f"{name}.mlp.gate_proj", normed)
        gate *= self._linear(f"{name}.mlp.up_proj", normed) / (1 + np.exp(-gate))
        return self._linear(f"{name}.mlp.down_proj", gate)

    def _linear(self, name: str, rows: Rows) -> Rows:
        out: Rows = rows @ self.tensors[f"{name}.weight"].T
        return out

    def _norm(self, name: str, rows: Rows) -> Rows:
        mean_square = np.mean(rows * rows, axis=-1, keepdims=True)
        scale = 1 / np.sqrt(mean_square + np.float32(self.config["rms_norm_eps"]))
        out: Rows = rows * scale * self.tensors[f"{name}.weight"]
        return out

    def _rotation(self, length: int) -> tuple[Rows, Rows]:
        half = self.config["head_dim"] // 2
        frequencies = self.config["rope_theta"] ** (-np.arange(half) / half)
        angles = np.arange(length)[:, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def _attention(self, name: str, rows: Rows, cos: Rows, sin: Rows) -> Rows:
        width = self.config["head_dim"]
        queries = self._heads(f"{name}.q_proj", rows, width)
        keys = self._heads(f"{name}.k_proj", rows, width)
        values = self._heads(f"{name}.v_proj", rows, width)
        share = len(queries) // len(keys)
        queries = _rotate(queries, cos, sin)
        keys = np.repeat(_rotate(keys, cos, sin), share, axis=0)
        values = np.repeat(values, share, axis=0)
        scores: Rows = queries @ keys.transpose(0, 2, 1) * np.float32(width**-0.5)
        scores += np.triu(np.full(scores.shape[1:], -np.inf, np.float32), k=1)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed: Rows = (scores @ values).transpose(1, 0, 2).reshape(len(rows), -1)
        return self._linear(f"{name}.o_proj", mixed)

    def _heads(self, name: str, rows: Rows, width: int) -> Rows:
        return self._linear(name, rows).reshape(len(rows), -1, width).transpose(1, 0, 2)


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of rows at one position: `[layers, rows, heads, positions, width]`."""

    keys: Rows
    values: Rows

    @classmethod
    def empty(cls, config: dict[str, Any], rows: int, positions: int) -> "Cache":
        """Make room for so many positions of a model."""
        heads, width = config["num_key_value_heads"], config["head_dim"]
        extent = (config["num_hidden_layers"], rows, heads, positions, width)
        return cls(np.zeros(extent, np.float32), np.zeros(extent, np.float32))

    def of_rows(self, chosen: npt.NDArray[np.bool_]) -> "Cache":
        """Return the cache of the rows that are `chosen`."""
        return Cache(self.keys[:, chosen], self.values[:, chosen])

    def attend(self, layer: int, position: int, queries: Rows, keys: Rows, values: Rows) -> Rows:
        """Take one position's keys and values, and return its queries' mixture, heads joined."""
        self.keys[layer, :, :, position] = keys
        self.values[layer, :, :, position] = values
        rows, heads, width = queries.shape
        groups = queries.reshape(rows, keys.shape[1], heads // keys.shape[1], width)
        held = self.keys[layer, :, :, : position + 1]
        scores: Rows = groups @ held.transpose(0, 1, 3, 2) * np.float32(width**-0.5)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed: Rows = scores @ self.values[layer, :, :, : position + 1]
        return mixed.reshape(rows, heads * width)


def read_safetensors(path: Path) -> dict[str, Rows]:
    """Read a bfloat16 safetensors file as float32 arrays.

    Raises ValueError on any other type: the demo model has no other.
    """
    whole = path.read_bytes()
    header_nbytes = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + header_nbytes])
    header.pop("__metadata__", None)
    tensors: dict[str, Rows] = {}
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}, not BF16")
        start, end = (8 + header_nbytes + offset for offset in entry["data_offsets"])
        halves = np.frombuffer(whole[start:end], np.uint16).astype(np.uint32)
        tensors[name] = (halves << 16).view(np.float32).reshape(entry["shape"])
    return tensors


def log_softmax(scores: Rows) -> Rows:
    """Return log probabilities over the last axis."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    out: Rows = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out


def _rotate(heads: Rows, cos: Rows, sin: Rows) -> Rows:
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
