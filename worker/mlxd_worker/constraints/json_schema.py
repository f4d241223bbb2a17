"""Read a JSON schema for what it demands; write it anew in the subset that the library enforces.

The library reads schemas, too, but leaves some demands out, reads a few differently from what the
schema means, and does not tell where it stopped. So each keyword is read here: enforced, an
annotation without a demand, or refused by name and place.

Invariants:
- What is written demands at least what the schema demands: no complete output violates it.
- A keyword that JSON Schema knows, in any draft from 4 to 2020-12, is never left out while it
  demands something. Keywords that no draft knows are annotations, as the specification has it.
- Only the parts that the root refers to are read.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mlxd_worker.constraints.schema_keywords import Schema, read_keywords
from mlxd_worker.constraints.schema_places import DEPTH_MAX, Document, Json, Place, SchemaError


def read_schema(text: str) -> dict[str, Any]:
    """Return the schema to be enforced, in draft 2020-12, its references under `$defs`.

    Raises:
        SchemaError: no JSON, no schema, or a demand that is not served; with the place.
    """
    document = Document(_parse(text))
    result = _object(read_keywords(Place(document, "#", document.content)))
    written: dict[str, Any] = {}
    while document.waiting:
        name, place = document.waiting.popitem()
        written[name] = read_keywords(place)
    if written:
        result["$defs"] = written
    return result


def _object(schema: Schema) -> dict[str, Any]:
    """Return a schema as an object: what its references need room beside."""
    return schema if isinstance(schema, dict) else {"allOf": [schema]}


def _parse(text: str) -> Json:
    try:
        value: Json = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except SchemaError:  # which is a ValueError as well
        raise
    except json.JSONDecodeError as error:
        raise SchemaError(f"{error.lineno}:{error.colno}", f"not JSON: {error.msg}") from None
    except UnicodeEncodeError:
        raise SchemaError("#", "an escape of half a surrogate pair, which no text holds") from None
    except ValueError:
        digits = sys.get_int_max_str_digits()
        raise SchemaError("#", f"an integer of more than {digits} digits") from None
    except RecursionError:
        raise SchemaError("#", f"nested more than {DEPTH_MAX} deep") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; a name that stands there twice would be left out in silence."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise SchemaError("#", f"the name {name[:80]!r} stands twice in one object")
        result[name] = value
    return result


def _refuse_constant(name: str) -> None:
    raise SchemaError("#", f"{name} is not a number of JSON")
