"""Weights as blobs, as Ollama keeps them: a file for a tensor or a few, and names of its own.

Beside a packed tensor X lie its scales, X.scale, and maybe its offsets, X.bias; an X.bias without
an X.scale is what it says. Everybody else calls them .scales and .biases of the module whose
.weight X is, and so do we from here on. No order of blobs or of tensors matters.

Invariants:
- One name is one tensor: blobs that hold it again must hold the same. Types and shapes are compared
  here, the bytes by whoever reads them (`check_copies`).
- How tensors are packed is said in their file's metadata, or else follows from the shapes; where it
  does neither, it is refused rather than guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxd_models.files.model_files import file_error
from mlxd_models.files.safetensors_header import Header, TensorFact, read_whole_header
from mlxd_models.files.stored_files import StoredFiles
from mlxd_shared.domain.errors import InvalidModel

Copy = tuple[TensorFact, TensorFact]
"""A tensor, and the same stored once more."""

NAMELESS = "data"
"""What older writers call the one tensor of a blob; the manifest has its name."""

COMPARED_BYTES = 1 << 20
_WEIGHT = ".weight"
SECOND_SCALE = "weight_scale_2"
"""What others call a plain factor beside the scales; MLX's own `global_scale` is another number."""
_SCALE, _OFFSET, _SECOND_SCALE = ".scale", ".bias", ".global_scale"
_WORD_BITS = 32
_PACKED_DTYPE = "U32"
_INFERRED_GROUPS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Form:
    """How a tensor is packed: values that share a scale, bits of one, and what they mean."""

    group_size: int
    bits: int
    mode: str = "affine"

    def to_json(self) -> dict[str, Any]:
        """Return it as config.json says it."""
        setting: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits}
        return setting if self.mode == "affine" else {**setting, "mode": self.mode}


_FORMS = {
    "int4": Form(64, 4), "fp4": Form(64, 4), "q4": Form(64, 4),
    "int8": Form(64, 8), "fp8": Form(64, 8), "q8": Form(64, 8),
    "nvfp4": Form(16, 4, "nvfp4"), "mxfp4": Form(32, 4, "mxfp4"), "mxfp8": Form(32, 8, "mxfp8"),
}  # fmt: skip


def read_blobs(files: StoredFiles) -> tuple[tuple[TensorFact, ...], tuple[Copy, ...]]:
    """Return all tensors by the names that everybody else gives them, and those stored again.

    Raises:
        InvalidModel: a damaged blob, or a tensor that blobs store in different types or shapes.
    """
    stored = [fact for _, fact in _read_stored(files)]
    names = {fact.name for fact in stored}
    taken: dict[str, TensorFact] = {}
    copies: dict[tuple[str, Path], Copy] = {}
    for own in stored:
        fact = replace(own, name=common_name(own.name, names))
        first = taken.setdefault(fact.name, fact)
        if first is fact or (first.file == fact.file and first.begin == fact.begin):
            continue
        if (first.dtype, first.shape) != (fact.dtype, fact.shape):
            problem = f"{_kind(fact)} here, {_kind(first)} in {first.file.name}"
            raise fact.error(problem, field=fact.stored_name)
        copies[fact.name, fact.file] = (first, fact)
    return tuple(taken.values()), tuple(copies.values())


def common_name(name: str, names: Collection[str]) -> str:
    """Return what a tensor is called elsewhere; `names` are all that are stored."""
    for suffix, part in ((_SCALE, "scales"), (_OFFSET, "biases"), (_SECOND_SCALE, SECOND_SCALE)):
        packed = name.removesuffix(suffix)
        if packed != name and packed in names and f"{packed}{_SCALE}" in names:
            return f"{packed.removesuffix(_WEIGHT)}.{part}"
    return name


def check_copies(copies: Iterable[Copy]) -> None:
    """Refuse tensors that blobs store again with other bytes. Reads both, a part at a time.

    Raises:
        InvalidModel: they differ, or a blob cannot be read; names both blobs.
    """
    for first, again in copies:
        try:
            same = _same_bytes(first, again)
        except OSError as error:
            raise file_error(error, again.file.name, again.name) from error
        if not same:
            problem = f"stored again in {again.file.name}, with other values"
            raise first.error(problem, field=first.stored_name)


def blob_quantization(files: StoredFiles) -> dict[str, Any] | None:
    """Return how blobs are packed, as config.json says it; None where none are.

    Raises:
        InvalidModel: a damaged blob, a kind of packing that is not known, or one that neither the
            metadata nor the shapes tell.
    """
    tensors = list(_read_stored(files))
    facts = {fact.name: fact for _, fact in tensors}
    hint = next((bits for header, _ in tensors if (bits := _hinted_bits(header))), None)
    forms: dict[str, Form] = {}
    for header, fact in tensors:
        scales = facts.get(f"{fact.name}{_SCALE}")
        if scales is not None:
            form = _stated_form(header, fact) or _inferred_form(fact, scales, hint)
            forms[fact.name.removesuffix(_WEIGHT)] = form
    if not forms:
        return None
    (common, _), *_ = Counter(forms.values()).most_common(1)
    own = {stem: form.to_json() for stem, form in sorted(forms.items()) if form != common}
    return common.to_json() | own


def _read_stored(files: StoredFiles) -> Iterable[tuple[Header, TensorFact]]:
    """Give every tensor by its own name, with the header of its blob; each header is read once."""
    headers: dict[Path, Header] = {}
    for blob in files.blobs:
        header = headers.get(blob.path)
        if header is None:
            header = headers[blob.path] = read_whole_header(blob.path)
        elif [fact.name for fact in header.tensors] != [NAMELESS]:
            continue
        for fact in header.tensors:
            named = blob.name if fact.name == NAMELESS and blob.name else fact.name
            if "/" in named:
                part = named.partition("/")[0]
                problem = f"of {part!r}: a model of several parts, none of which is served alone"
                raise InvalidModel(problem, file=blob.path.name, field=named)
            yield header, replace(fact, name=named, own_name=fact.name)


def _stated_form(header: Header, fact: TensorFact) -> Form | None:
    """Return what the metadata says of a tensor, its own word before the file's."""
    metadata = header.metadata
    kind = metadata.get(f"{fact.name}.quant_type") or metadata.get("quant_type")
    size = metadata.get(f"{fact.name}.group_size") or metadata.get("group_size")
    if not kind:
        return None
    form = _FORMS.get(kind.lower())
    if form is None:
        problem = f"quant_type {kind!r:.40} is not one of {', '.join(sorted(_FORMS))}"
        raise fact.error(problem)
    if not size:
        return form
    if not (size.isascii() and size.isdecimal() and len(size) < 6 and int(size) > 0):
        raise fact.error(f"group_size {size!r:.40} is not a size")
    return replace(form, group_size=int(size))


def _hinted_bits(header: Header) -> int | None:
    form = _FORMS.get(header.metadata.get("quant_type", "").lower())
    return None if form is None else form.bits


def _inferred_form(fact: TensorFact, scales: TensorFact, hint: int | None) -> Form:
    """Return the affine form of these shapes: words of 32 bits, a scale for each group of a row."""
    words = fact.shape[-1] if fact.shape else 0
    groups = scales.shape[-1] if scales.shape else 0
    if fact.dtype == _PACKED_DTYPE and words and groups:
        fitting = {
            bits: size
            for bits in (4, 8)
            if (values := words * _WORD_BITS // bits) % groups == 0
            and (size := values // groups) in _INFERRED_GROUPS
        }
        match fitting:
            case {4: 32}:
                return Form(32, 4)
            case {8: 64}:
                return Form(64, 8)
            case {4: 64, 8: 32} if hint is not None:
                return Form(fitting[hint], hint)
        if len(fitting) == 1:
            ((bits, size),) = fitting.items()
            return Form(size, bits)
    problem = f"packed as {_kind(fact)} with scales {_kind(scales)}, and nothing says how"
    raise fact.error(problem)


def _same_bytes(first: TensorFact, again: TensorFact) -> bool:
    with first.file.open("rb") as one, again.file.open("rb") as other:
        one.seek(first.begin)
        other.seek(again.begin)
        left = first.nbytes
        while left:
            count = min(left, COMPARED_BYTES)
            if one.read(count) != other.read(count):
                return False
            left -= count
    return True


def _kind(fact: TensorFact) -> str:
    return f"{fact.dtype} {list(fact.shape)}"
