"""A model's identity, from its files: the same content has the same digest wherever it lies.

Invariants:
- Covers the configuration and tokenizer files whole, and each weights file's header, size and a
  sample out of the middle of every tensor. So two fine-tunes of one base, whose headers are equal
  byte for byte, differ; and a large model takes milliseconds, not minutes.
- Names and paths of folders do not matter; file names do.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from mlxd_shared.config import (
    CONFIG_FILE_BYTES_MAX,
    SAFETENSORS_HEADER_BYTES_MAX,
    TOKENIZER_FILE_BYTES_MAX,
)
from mlxd_shared.errors import InvalidModel
from mlxd_shared.weights import INDEX_FILE, TensorFact, read_model_dir

WHOLE_FILES = {
    "chat_template.jinja": CONFIG_FILE_BYTES_MAX,
    "config.json": CONFIG_FILE_BYTES_MAX,
    "generation_config.json": CONFIG_FILE_BYTES_MAX,
    INDEX_FILE: SAFETENSORS_HEADER_BYTES_MAX,
    "special_tokens_map.json": CONFIG_FILE_BYTES_MAX,
    "tokenizer.json": TOKENIZER_FILE_BYTES_MAX,
    "tokenizer_config.json": CONFIG_FILE_BYTES_MAX,
}
SAMPLE_BYTES_MAX = 1024
_LENGTH_BYTES = 8


def model_digest(folder: Path) -> str:
    """Return the model's identity, 64 hexadecimal digits.

    Raises:
        InvalidModel: no weights, or a file is damaged, unreadable or over its bound.
    """
    digest = hashlib.sha256()
    facts = read_model_dir(folder)
    try:
        for name, bytes_max in sorted(WHOLE_FILES.items()):
            path = folder / name
            if path.is_file():
                if path.stat().st_size > bytes_max:
                    raise InvalidModel(f"over {bytes_max} bytes long", file=name)
                _add(digest, name, path.read_bytes())
        for file in sorted({fact.file for fact in facts}):
            _add_weights(digest, file, [fact for fact in facts if fact.file == file])
    except OSError as error:
        name = Path(str(error.filename)).name
        raise InvalidModel(error.strerror or "unreadable", file=name) from error
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    """Feed a named part, framed so that no two sequences of parts look alike."""
    label = name.encode()
    digest.update(len(label).to_bytes(8, "little") + label)
    digest.update(len(content).to_bytes(8, "little") + content)


def _add_weights(digest: hashlib._Hash, file: Path, facts: list[TensorFact]) -> None:
    """Feed one weights file: header, size, samples; `facts` come in the order of their data."""
    with file.open("rb") as stream:
        header_nbytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        _add(digest, file.name, stream.read(header_nbytes))
        _add(digest, "size", str(file.stat().st_size).encode())
        begin = _LENGTH_BYTES + header_nbytes
        for fact in facts:
            stream.seek(begin + max(fact.nbytes - SAMPLE_BYTES_MAX, 0) // 2)
            _add(digest, fact.name, stream.read(min(SAMPLE_BYTES_MAX, fact.nbytes)))
            begin += fact.nbytes
