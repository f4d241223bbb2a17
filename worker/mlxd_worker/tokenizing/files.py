"""Reads a model folder's tokenizer from its files; errors name the file.

Sources, first that says it wins
- the tokenizer itself: tokenizer.json;
- EOS: generation_config.json, config.json, tokenizer_config.json, special_tokens_map.json;
- BOS: tokenizer_config.json, special_tokens_map.json, config.json, generation_config.json;
- whether a text begins with BOS: tokenizer_config.json's add_bos_token, else the post-processor.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from mlxd_models.files.generation_defaults import BOS_SOURCES, EOS_SOURCES
from mlxd_models.files.model_config import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, no_tokenizer
from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.stored_files import StoredFiles
from mlxd_shared.config import TOKENIZER_FILE_BYTES_MAX, TOKENIZER_PIECE_CHARS_MAX
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.text.rules import Judgement, check_tokenizer, read_settings
from mlxd_worker.text.tokenizer import Tokenizer, library_faults, read_raw
from mlxd_worker.tokenizing.children import try_tokenizer


def load_tokenizer(source: Source) -> Tokenizer:
    """Return the tokenizer of a model.

    Raises:
        InvalidModel: a file is missing, too large, damaged or contradicts another; it names the
        file and the field.
    """
    stored = files_of(source)
    content, judged = _read_content(stored)
    with library_faults("is not a tokenizer", stored.label(TOKENIZER_FILE)):
        raw = read_raw(content)
    names = {name for name, _ in EOS_SOURCES + BOS_SOURCES}
    files = {name: stored.read_json(name) for name in sorted(names)}
    eos_ids = _first_ids(raw, files, EOS_SOURCES)
    bos_ids = _first_ids(raw, files, BOS_SOURCES)
    add_bos = files[TOKENIZER_CONFIG_FILE].get("add_bos_token")
    if add_bos is not None and not isinstance(add_bos, bool):
        raise InvalidModel("neither true nor false", TOKENIZER_CONFIG_FILE, "add_bos_token")
    if add_bos and not bos_ids:
        raise InvalidModel(
            "asks for a BOS that no file names", TOKENIZER_CONFIG_FILE, "add_bos_token"
        )
    with library_faults("is not a tokenizer", stored.label(TOKENIZER_FILE)):
        tokenizer = Tokenizer(
            raw,
            bos_id=bos_ids[0] if bos_ids else None,
            add_bos=add_bos,
            eos_ids=eos_ids,
            content=content,
            **asdict(judged),
        )
    if tokenizer.piece_chars_max > TOKENIZER_PIECE_CHARS_MAX:
        problem = f"a token of {tokenizer.piece_chars_max} characters; at most"
        raise InvalidModel(f"{problem} {TOKENIZER_PIECE_CHARS_MAX}", stored.label(TOKENIZER_FILE))
    return tokenizer


def _read_content(stored: StoredFiles) -> tuple[bytes, Judgement]:
    """Return tokenizer.json, and what it costs; one that is not plain has stood its trial."""
    content = stored.read(TOKENIZER_FILE, bytes_max=TOKENIZER_FILE_BYTES_MAX)
    if content is None:
        raise no_tokenizer()
    label = stored.label(TOKENIZER_FILE)
    judged = check_tokenizer(read_settings(content, file=label), file=label)
    if not judged.is_plain:
        try_tokenizer(content, file=label)
    return content, judged


def _first_ids(
    raw: RawTokenizer, files: dict[str, dict[str, Any]], sources: tuple[tuple[str, str], ...]
) -> tuple[int, ...]:
    """Return the ids that the first source with an answer gives; none where no source has one."""
    for file, field in sources:
        value = files[file].get(field)
        if value is not None:
            items = value if isinstance(value, list) else [value]
            return tuple(dict.fromkeys(_token_id(raw, item, file, field) for item in items))
    return ()


def _token_id(raw: RawTokenizer, item: object, file: str, field: str) -> int:
    """Return the id that `item` stands for: an id, a token, or a token with its attributes."""
    if isinstance(item, dict):
        item = item.get("content")
    if isinstance(item, str):
        token_id: int | None = raw.token_to_id(item)
        if token_id is None:
            raise InvalidModel(f"{item!r} is not in {TOKENIZER_FILE}", file, field)
        return token_id
    if isinstance(item, bool) or not isinstance(item, int) or item < 0:
        raise InvalidModel(f"{item!r} is neither a token nor an id", file, field)
    return item
