"""The common form of aliases.json and loaded.json: {"version": 1, FIELD: {NAME: TEXT}}. Pure."""

from __future__ import annotations

from collections.abc import Callable

from mlxd_controller.store.shelf import is_name
from mlxd_models.files.model_files import parse_json_object
from mlxd_shared.domain.errors import InvalidModel

VERSION = 1


def parse_names(
    raw: bytes,
    *,
    file: str,
    field: str,
    names_max: int,
    may_be: Callable[[str], bool] = is_name,
) -> dict[str, str]:
    """Return the names in `field` and their texts. may_be: whether a text may be a name there.

    Raises:
        InvalidModel: the file has another form or version, too many names, or an invalid name;
            names the field.
    """
    content = parse_json_object(raw, file=file)
    if content.get("version") != VERSION or content.keys() - {"version", field}:
        raise InvalidModel(f"not version {VERSION}, with {field} and nothing else", file)
    names = content.get(field)
    if not isinstance(names, dict) or len(names) > names_max:
        raise InvalidModel(f"not at most {names_max} names", file, field)
    for name, text in names.items():
        if not may_be(name) or not isinstance(text, str):
            raise InvalidModel(f"{text!r:.80} is not valid here", file, f"{name:.80}")
    return names
