"""A model's identity, from its files: the same content has the same digest wherever it lies.

Invariants:
- Covers the configuration and tokenizer files whole, and each weights file's header, size and a
  sample out of the middle of every tensor. So two fine-tunes of one base, whose headers are equal
  byte for byte, differ; and a large model takes milliseconds, not minutes.
- Names and paths of folders do not matter; file names do.
- A small file that is named by its content is what its name says, or refused.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from mlxd_models.files.image_settings import IMAGE_FILE, PROCESSOR_FILE
from mlxd_models.files.model_files import file_error
from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.ollama_manifest import PARAMETERS_FILE
from mlxd_models.files.safetensors_header import LENGTH_BYTES
from mlxd_models.files.stored_files import StoredFiles
from mlxd_models.files.weights import INDEX_FILE, TensorFact, read_weights
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel

WHOLE_FILES = {
    "1_Pooling/config.json": config.CONFIG_FILE_BYTES_MAX,
    "additional_chat_templates/tool_use.jinja": config.CONFIG_FILE_BYTES_MAX,
    "chat_template.jinja": config.CONFIG_FILE_BYTES_MAX,
    "chat_template.json": config.CONFIG_FILE_BYTES_MAX,
    "config.json": config.CONFIG_FILE_BYTES_MAX,
    "generation_config.json": config.CONFIG_FILE_BYTES_MAX,
    "modules.json": config.CONFIG_FILE_BYTES_MAX,
    INDEX_FILE: config.SAFETENSORS_HEADER_BYTES_MAX,
    IMAGE_FILE: config.CONFIG_FILE_BYTES_MAX,
    PROCESSOR_FILE: config.CONFIG_FILE_BYTES_MAX,
    PARAMETERS_FILE: config.CONFIG_FILE_BYTES_MAX,
    "special_tokens_map.json": config.CONFIG_FILE_BYTES_MAX,
    "tokenizer.json": config.TOKENIZER_FILE_BYTES_MAX,
    "tokenizer_config.json": config.CONFIG_FILE_BYTES_MAX,
}
SAMPLE_BYTES_MAX = 1024
_BY_CONTENT = "sha256-"


def model_digest(source: Source) -> str:
    """Return the model's identity, 64 hexadecimal digits.

    Raises:
        InvalidModel: no weights, or a file is damaged, unreadable or over its bound.
    """
    digest = hashlib.sha256()
    files = files_of(source)
    weights = read_weights(files)
    facts: dict[Path, list[TensorFact]] = {}
    for fact in (*weights.facts, *(again for _, again in weights.copies)):
        facts.setdefault(fact.file, []).append(fact)
    try:
        for name, bytes_max in sorted(WHOLE_FILES.items()):
            content = files.read(name, bytes_max=bytes_max)
            if content is not None:
                _check_content(files, name, content)
                _add(digest, name, content)
        for file, own in sorted(facts.items()):
            _add_weights(digest, file, sorted(own, key=lambda fact: (fact.begin, fact.name)))
    except OSError as error:
        name = Path(str(error.filename)).name
        raise file_error(error, name) from error
    return digest.hexdigest()


def _check_content(files: StoredFiles, name: str, content: bytes) -> None:
    path = files.path_of(name)
    file = "" if path is None else path.name
    if files.by_content and file != _BY_CONTENT + hashlib.sha256(content).hexdigest():
        raise InvalidModel("damaged: its content does not match its name", files.label(name))


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    """Feed a named part, framed so that no two sequences of parts look alike."""
    label = name.encode()
    digest.update(len(label).to_bytes(8, "little") + label)
    digest.update(len(content).to_bytes(8, "little") + content)


def _add_weights(digest: hashlib._Hash, file: Path, facts: list[TensorFact]) -> None:
    """Feed one weights file: header, size, samples; `facts` come in the order of their data."""
    with file.open("rb") as stream:
        header_nbytes = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        _add(
            digest, file.name, stream.read(min(header_nbytes, config.SAFETENSORS_HEADER_BYTES_MAX))
        )
        _add(digest, "size", str(file.stat().st_size).encode())
        for fact in facts:
            stream.seek(fact.begin + max(fact.nbytes - SAMPLE_BYTES_MAX, 0) // 2)
            _add(digest, fact.name, stream.read(min(SAMPLE_BYTES_MAX, fact.nbytes)))
