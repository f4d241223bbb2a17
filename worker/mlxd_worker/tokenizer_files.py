"""Read a model folder's tokenizer: which files say what, and what is wrong with them by name.

Sources, first that says it wins
- the tokenizer itself: tokenizer.json;
- EOS: generation_config.json, config.json, tokenizer_config.json, special_tokens_map.json;
- BOS: tokenizer_config.json, special_tokens_map.json, config.json, generation_config.json;
- whether a text begins with BOS: tokenizer_config.json's add_bos_token, else the post-processor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as RawTokenizer

from mlxd_shared.config import CONFIG_FILE_BYTES_MAX, TOKENIZER_FILE_BYTES_MAX
from mlxd_shared.errors import InvalidModel
from mlxd_shared.model_files import parse_json_object, read_file
from mlxd_worker.tokenizer import Tokenizer

TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
GENERATION_CONFIG_FILE: Final = "generation_config.json"
CONFIG_FILE: Final = "config.json"

_EOS_SOURCES: Final = (
    (GENERATION_CONFIG_FILE, "eos_token_id"),
    (CONFIG_FILE, "eos_token_id"),
    (TOKENIZER_CONFIG_FILE, "eos_token"),
    (SPECIAL_TOKENS_FILE, "eos_token"),
)
_BOS_SOURCES: Final = (
    (TOKENIZER_CONFIG_FILE, "bos_token"),
    (SPECIAL_TOKENS_FILE, "bos_token"),
    (CONFIG_FILE, "bos_token_id"),
    (GENERATION_CONFIG_FILE, "bos_token_id"),
)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of the model in `folder`.

    Raises:
        InvalidModel: a file is missing, too large, damaged or contradicts another; it names the
        file and the field.
    """
    raw = _read_tokenizer(folder / TOKENIZER_FILE)
    names = {name for name, _ in _EOS_SOURCES + _BOS_SOURCES}
    files = {name: _read_json(folder / name) for name in sorted(names)}
    eos_ids = _first_ids(raw, files, _EOS_SOURCES)
    bos_ids = _first_ids(raw, files, _BOS_SOURCES)
    add_bos = files[TOKENIZER_CONFIG_FILE].get("add_bos_token")
    if add_bos is not None and not isinstance(add_bos, bool):
        raise InvalidModel("neither true nor false", TOKENIZER_CONFIG_FILE, "add_bos_token")
    if add_bos and not bos_ids:
        raise InvalidModel(
            "asks for a BOS that no file names", TOKENIZER_CONFIG_FILE, "add_bos_token"
        )
    return Tokenizer(raw, bos_id=bos_ids[0] if bos_ids else None, add_bos=add_bos, eos_ids=eos_ids)


def _read_tokenizer(path: Path) -> RawTokenizer:
    content = read_file(path, bytes_max=TOKENIZER_FILE_BYTES_MAX)
    if content is None:
        raise InvalidModel("is missing; mlxd reads this format only", path.name)
    try:
        raw = RawTokenizer.from_buffer(content)
    except Exception as error:  # the library raises the bare class
        raise InvalidModel(f"is no tokenizer: {error}", path.name) from error
    raw.no_truncation()  # limits left over from training would cut prompts in silence
    raw.no_padding()
    return raw


def _read_json(path: Path) -> dict[str, Any]:
    """Return a file's object; a file that is not there says nothing."""
    raw = read_file(path, bytes_max=CONFIG_FILE_BYTES_MAX)
    return {} if raw is None else parse_json_object(raw, file=path.name)


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
        found: int | None = raw.token_to_id(item)
        if found is None:
            raise InvalidModel(f"{item!r} is not in {TOKENIZER_FILE}", file, field)
        return found
    if isinstance(item, bool) or not isinstance(item, int) or item < 0:
        raise InvalidModel(f"{item!r} is neither a token nor an id", file, field)
    return item
