"""What a router wants to know of a model before it sends it requests: facts and tokenizer.

Everything here reads a model's files, and so blocks on the disk.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import Message
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from mlxd.v1 import types_pb2
from mlxd_models.files.generation_defaults import BOS_SOURCES, EOS_SOURCES, GENERATION_CONFIG_FILE
from mlxd_models.files.large_json import parse_large_object
from mlxd_models.files.model_config import (
    CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    no_tokenizer,
)
from mlxd_models.files.model_source import files_of
from mlxd_models.files.stored_files import StoredFiles
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel

TOKENIZER_FILES: Final = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    "chat_template.jinja",
    "chat_template.json",
)
"""What turns chats into ids and ids into text, as far as a model has it."""
_FOUND_NOWHERE: Final = "/mlxd"
"""A path for tokenizers that no machine has: a folder of a model's path may be another one there,
and a router that finds none asks for the files."""
_ZIPPED_AT: Final = (1980, 1, 1, 0, 0, 0)
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_DIGITS: Final = 6  # of floats that come as 32 bits


def info_to_pb(model: types_pb2.Model, *, name: str) -> Message:
    """Return what GetModelInfo answers at the port of `name`, one of the model's names.

    Raises:
        InvalidModel: a file cannot be read.
    """
    files = files_of(Path(model.path))
    read = files.read_json(CONFIG_FILE)
    eos, bos = _find_ids(files, EOS_SOURCES), _find_ids(files, BOS_SOURCES)
    context = model.context_length or model.context_length_max
    sampling = {
        name: round(getattr(model.effective_sampling, name), _DIGITS)
        for name in _SAMPLING
        if model.effective_sampling.HasField(name)
    }
    made: Message = pb.GetModelInfoResponse(
        model_path=model.path,
        tokenizer_path=f"{_FOUND_NOWHERE}/{model.digest}",
        served_model_name=name,
        is_generation=not model.has_pooling,
        max_context_length=context,
        max_req_input_len=max(0, context - 1),
        vocab_size=model.vocab_size,
        model_type=_text(read.get("model_type")),
        architectures=[model.architecture],
        eos_token_ids=eos,
        bos_token_id=next(iter(bos), 0),
        pad_token_id=next(iter(_ids(read, "pad_token_id")), 0),
        default_sampling_params_json=json.dumps(sampling),
    )
    return made


def zip_tokenizer(path: Path) -> bytes:
    """Return the tokenizer's files as an archive; of equal files it is equal.

    Raises:
        InvalidModel: there is no tokenizer.json, a file cannot be read, or all are too large.
    """
    files = files_of(path)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name in TOKENIZER_FILES:
            raw = files.read(name, bytes_max=config.TOKENIZER_FILE_BYTES_MAX)
            if raw is not None:
                zipped.writestr(zipfile.ZipInfo(name, _ZIPPED_AT), raw, zipfile.ZIP_DEFLATED)
            elif name == TOKENIZER_FILE:
                raise no_tokenizer()
    if archive.tell() > config.ROUTER_TOKENIZER_BYTES_MAX:
        problem = f"over {config.ROUTER_TOKENIZER_BYTES_MAX} bytes long when it is compressed"
        raise InvalidModel(problem, file=TOKENIZER_FILE)
    return archive.getvalue()


def digest_of(archive: bytes) -> str:
    """Return the digest of a whole archive, which takes a while."""
    return hashlib.sha256(archive).hexdigest()


def chunks_of(archive: bytes, digest: str) -> Iterator[Message]:
    """Yield an archive in parts; the last one has its digest."""
    step = config.ROUTER_TOKENIZER_CHUNK_BYTES
    for begin in range(0, len(archive), step):
        is_last = begin + step >= len(archive)
        yield common_pb2.GetTokenizerChunk(
            data=archive[begin : begin + step],
            sha256=digest if is_last else "",
        )


def _find_ids(files: StoredFiles, sources: Iterable[tuple[str, str]]) -> list[int]:
    """Return the ids of the first source with an answer, as the worker does; none without one.

    Raises:
        InvalidModel: a file cannot be read.
    """
    for file, field in sources:
        value = files.read_json(file).get(field)
        if value is not None:
            listed = value if isinstance(value, list) else [value]
            named = [each.get("content") if isinstance(each, dict) else each for each in listed]
            words = [each for each in named if isinstance(each, str)]
            ids = _ids_of_words(files, words) if words else {}
            found_ids = [ids.get(each) if isinstance(each, str) else each for each in named]
            return _ids({field: found_ids}, field)
    return []


def _ids_of_words(files: StoredFiles, words: Collection[str]) -> dict[str, int]:
    """Return the ids of those tokens that the tokenizer has: as added ones, else as its model's."""
    raw = files.read(TOKENIZER_FILE, bytes_max=config.TOKENIZER_FILE_BYTES_MAX)
    if raw is None:
        return {}
    tokenizer = parse_large_object(raw, file=files.label(TOKENIZER_FILE))
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # pieces with their scores, in the order of their ids
        vocab = {piece[0]: i for i, piece in enumerate(vocab) if isinstance(piece, list) and piece}
    ids = {word: vocab[word] for word in words if word in vocab} if vocab else {}
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("content") in words:
            ids[token["content"]] = token.get("id")
    return ids


def _ids(values: Mapping[str, Any], name: str) -> list[int]:
    """Return the token ids that a file gives under a name: one, several or none."""
    value = values.get(name)
    listed = value if isinstance(value, list) else [value]
    return [each for each in listed if type(each) is int and 0 <= each < 1 << 31]


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
