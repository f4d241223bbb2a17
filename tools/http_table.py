"""Writes the tables of docs/http.md: what becomes of each field of each request, from the code.

python tools/http_table.py            # write them
python tools/http_table.py --check    # exit 1 where they are not what is written there
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from mlxd_gateway.anthropic import requests as anthropic
from mlxd_gateway.cohere import requests as cohere
from mlxd_gateway.common.fates import HONOURED, Foreign, Kind, fates_of
from mlxd_gateway.ollama import requests as ollama
from mlxd_gateway.openai import requests as openai
from mlxd_gateway.openai.responses import requests as responses
from mlxd_gateway.page import requests as page

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "http.md"
ROLE = re.compile(r"(?P<list>messages|input|tools|tool_choice)\[(?P<role>\w+)\]")
BEGIN, END = "<!-- made by tools/http_table.py -->\n", "<!-- end of what is made -->\n"
REQUESTS: tuple[type[msgspec.Struct], ...] = (
    openai.ChatRequest, openai.CompletionRequest, openai.EmbeddingRequest,
    responses.ResponseRequest, responses.RetrieveQuery, responses.InputItemsQuery,
    anthropic.MessageRequest, anthropic.CountRequest,
    ollama.ChatRequest, ollama.GenerateRequest, ollama.EmbedRequest, ollama.OldEmbedRequest,
    ollama.ShowRequest, ollama.PullRequest,
    cohere.RerankRequest, cohere.NewRerankRequest,
    page.WatchQuery, page.LogsQuery, page.FitRequest, page.LoadRequest, page.UnloadRequest,
)  # fmt: skip


def structs_in(hint: object) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs that a field's annotation holds, at any depth of lists and unions."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    elif get_origin(hint) in {Annotated, Union, types.UnionType, list}:
        arguments = get_args(hint)
        for argument in arguments[:1] if get_origin(hint) is Annotated else arguments:
            yield from structs_in(argument)


def fields_of(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the path, the fate and the reason of each field of a request, its parts included."""
    hints: dict[str, Any] = get_type_hints(kind, include_extras=True)
    encoded = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    for name, hint in hints.items():
        if name not in encoded:
            continue
        fate = fates_of(kind)[encoded[name]]
        is_list = "list[" in str(hint)
        yield f"{prefix}{encoded[name]}", fate.kind.value, reason_of(fate.why, fate.neutral)
        for inner in structs_in(hint):
            tag = inner.__struct_config__.tag
            label = f"[{tag}]" if tag else ("[]" if is_list else "")
            if issubclass(inner, Foreign):
                yield f"{prefix}{encoded[name]}{label}", Kind.REFUSED.value, inner.why
                continue
            yield from fields_of(inner, f"{prefix}{encoded[name]}{label}.")


def reason_of(why: str, neutral: tuple[object, ...]) -> str:
    """Return a reason, with the values that are good in any case."""
    if not neutral:
        return why
    values = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in neutral)
    return f"{why} (good: {values})"


def merge_roles(rows: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return the rows, those in one that say the same of messages or parts of several kinds."""
    roles: dict[tuple[str, str, str], list[str]] = {}
    for path, fate, why in rows:
        role = ROLE.match(path)
        key = (path if role is None else ROLE.sub(r"\g<list>[{}]", path, count=1), fate, why)
        roles.setdefault(key, []).append("" if role is None else role["role"])
    return [
        (path.format(", ".join(names)), fate, why) for (path, fate, why), names in roles.items()
    ]


def tables() -> str:
    """Return all tables: what is plainly honoured in one line, the rest field by field."""
    lines: list[str] = []
    for kind in REQUESTS:
        rows = merge_roles(fields_of(kind))
        plain = [path for path, fate, why in rows if (fate, why) == (HONOURED.kind.value, "")]
        lines += [f"### {(kind.__doc__ or '').partition(';')[0].rstrip('.')}", ""]
        lines += ["| field | | |", "|---|---|---|"]
        if plain:
            lines.append(f"| {', '.join(f'`{path}`' for path in plain)} | honoured | |")
        lines += [f"| `{path}` | {fate} | {why} |" for path, fate, why in rows if path not in plain]
        lines.append("")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """Return a document with the tables between its marks."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{tables()}\n{END}{tail}"


def main() -> int:
    """Write or check; return the exit code."""
    text = DOCUMENT.read_text(encoding="utf-8")
    made = with_tables(text)
    if "--check" in sys.argv:
        return int(made != text)
    DOCUMENT.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
