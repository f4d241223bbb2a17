"""`mlxd show`: all that is known of one model, loaded or not.

The server says most of it. Parameters, packing and licence stand in the model's files, which are
read where the server runs on this machine and they are those that it means, by their digest.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from mlxd.messages import Model
from mlxd_controller.cli import options as o
from mlxd_controller.cli.completion import named_model
from mlxd_controller.cli.grouping import ask_server
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.terminal import show as out
from mlxd_models.describe import Description, describe
from mlxd_models.files.digest import model_digest
from mlxd_models.files.model_source import files_of
from mlxd_models.files.stored_files import StoredFiles
from mlxd_shared.config import MODEL_CARD_BYTES_READ
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.figures import ModelState
from mlxd_shared.domain.units import format_bytes
from mlxd_shared.security.net import parse_address

CARD_FILE, LICENCE_FILES = "README.md", ("LICENSE", "LICENSE.txt", "LICENSE.md")
_FRONT = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)
_LICENCE = re.compile(r"^license:[ \t]*['\"]?([^'\"\r\n#]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a model's files say of it."""

    parameters: int
    quantization: str
    licence: str


@ask_server
async def show(
    model: Annotated[str, named_model("A name, alias or digest.", metavar="MODEL")],
    *,
    output: o.Output = None,
    as_json: o.Json = False,
    where: Server,
) -> None:
    """Show a model: parameters, form, context, template, licence, digest, path, and defaults."""
    async with where.client() as client:
        known = await client.model(model)
    facts = None
    if parse_address(where.address).loopback:
        facts = await asyncio.to_thread(read_facts, Path(known.path), known.digest)
    if as_json or output == "json":
        out.json_line(asdict(known) | {"files": None if facts is None else asdict(facts)})
    else:
        out.fields(list(_lines(known, facts)))


def read_facts(path: Path, digest: str) -> FileFacts | None:
    """Return what the files of a folder say; None where they are not those of this digest."""
    if not path.is_dir():
        return None
    try:
        files = files_of(path)
        if model_digest(files) != digest:
            return None
        described = describe(files)
        licence = read_licence(files)
    except (InvalidModel, OSError):
        return None
    return FileFacts(described.weight_values, describe_packing(described), licence)


def describe_packing(described: Description) -> str:
    """Return how most packed weights are stored, and in what the others are."""
    packings = Counter(
        spec.packing for spec in described.specs if spec.required and spec.packing is not None
    )
    numbers = described.stored.value
    if not packings:
        return f"none, stored as {numbers}"
    packing, _ = packings.most_common(1)[0]
    more = ", others in other forms" if len(packings) > 1 else ""
    return (
        f"{packing.mode.value}, {packing.bits} bits in groups of {packing.group_size}{more};"
        f" the rest {numbers}"
    )


def read_licence(files: StoredFiles) -> str:
    """Return what the model card's front matter says, or how the licence begins; "" for neither."""
    card = _beginning(files, CARD_FILE)
    front = _FRONT.match(card)
    said = _LICENCE.search(front[1]) if front is not None else None
    if said is not None:
        return said[1].strip()
    texts = (_beginning(files, name) for name in LICENCE_FILES)
    first = (line.strip() for text in texts for line in text.splitlines() if line.strip())
    return next(first, "")[:80]


def _beginning(files: StoredFiles, name: str) -> str:
    path = files.path_of(name)
    if path is None:
        return ""
    with path.open("rb") as file:
        return file.read(MODEL_CARD_BYTES_READ).decode(errors="replace")


def _lines(model: Model, facts: FileFacts | None) -> Iterator[tuple[str, str]]:
    """Yield name and value of each line; an empty value is left out."""
    yield "name", ", ".join((model.name, *model.aliases))
    yield "state", out.state(model)
    yield "error", model.error
    yield "architecture", model.architecture
    if facts is not None:
        yield "parameters", _count(facts.parameters)
        yield "quantization", facts.quantization
        yield "licence", facts.licence
    yield "stored", f"{format_bytes(model.stored_nbytes)} in store {model.store}"
    yield "context", _context(model)
    yield "vocabulary", str(model.vocab_size or "")
    yield "chat template", "yes" if model.has_chat_template else "none: it continues texts"
    yield "embeddings", "made for them" if model.has_pooling else ""
    yield "images", "seen in chats" if model.has_vision else ""
    if model.state is ModelState.READY:
        yield "in memory", f"{format_bytes(model.resident_nbytes)} on {model.device}"
        yield "in force", f"{model.rows_max} rows, {out.form(model)}"
        yield "ranks", f"{model.ranks}, each with a part" if model.ranks > 1 else ""
        yield "until", out.until(model, dt.datetime.now(dt.UTC))
    yield "defaults", _defaults(model)
    yield "digest", model.digest
    yield "path", out.place(model)


def _context(model: Model) -> str:
    most = f"{model.context_length_max} tokens" if model.context_length_max else ""
    return f"{most}, {model.context_length} in force" if model.context_length else most


def _defaults(model: Model) -> str:
    values = asdict(model.effective_sampling)
    return ", ".join(f"{name} {value:g}" for name, value in values.items() if _is_number(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _count(number: int) -> str:
    """Return a count for people, such as 344.4 million."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.1f} {word}"
    return str(number)
