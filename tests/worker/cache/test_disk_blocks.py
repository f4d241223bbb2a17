"""Blocks of every kind of layer: cut from snapshots, through a file, and back, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from mlxd_shared.blocks.block_file import Block, BlockRefused, Fault, Part, Tensor, decode, encode
from mlxd_shared.blocks.sealing import DiskKey
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.base import Kind, LayerCache
from mlxd_worker.cache.disk.cutting import bytes_of, count_arrays, cut, states_of, tensors_of
from mlxd_worker.cache.disk.shapes import BlockShapes, describe_layers
from mlxd_worker.cache.kept.snapshot import Snapshot
from mlxd_worker.cache.kept.stacks import LayerState
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from tests.shared.blocks.made_blocks import filling
from tests.support.kept_on_disk import BLOCK_TOKENS, shapes_of
from tests.worker.cache.keeping import copy_out, snapshots_of
from tests.worker.cache.pair import Pair, pair
from tests.worker.cache.subjects import SUBJECTS, Subject

DEPTH = 3
START, STOP = DEPTH * BLOCK_TOKENS, (DEPTH + 1) * BLOCK_TOKENS


@pytest.fixture(params=SUBJECTS, ids=lambda subject: subject.name)
def held(request: pytest.FixtureRequest) -> Pair:
    """The caches of a subject with one row, which stands at the end of a block."""
    subject: Subject = request.param
    new = pair(subject)
    row = new.join(STOP)
    assert row is not None
    new.append([row], START - 5)
    new.append([row], STOP - START + 5)
    return new


def bits(states: tuple[LayerState, ...]) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Return arrays as types, shapes and bytes."""
    return [
        (
            str(array.dtype),
            tuple(array.shape),
            bytes_of(mx.contiguous(array).view(mx.uint8)),
        )
        for state in states
        for array in state
    ]


def through_a_file(part: Part, tensors: tuple[Tensor, ...], *, key: DiskKey | None = None) -> Block:
    """Return a block that was written and read; encrypted and decrypted between, with a key."""
    tokens = bytes(4 * BLOCK_TOKENS)
    name_key = b"" if key is None else key.name_key
    block = Block(b"f" * 32, b"b" * 32, tokens, DEPTH, part, tensors, name_key)
    digits = (b"f" * 32).hex()
    if key is None:
        raw = memoryview(b"".join(bytes(piece) for piece in encode(block)))
    else:
        sealed = b"".join(key.seal(encode(block), place="here"))
        raw = key.unseal(filling(sealed), len(sealed), place="here")
    return decode(raw, form_digits=digits, wanted=block.id, name_key=name_key)


def owned_by(held: Pair, start: int) -> dict[Kind, Snapshot]:
    """Return owned snapshots of the one row from `start` on."""
    (row,) = held.rows
    snapshots = snapshots_of(held.caches.contents, row, start)
    for snapshot in snapshots.values():
        copy_out(snapshot)
    return snapshots


def test_shapes_are_those_of_what_is_read(held: Pair) -> None:
    """Of every kind of layer, whatever range is asked for; and a file's size follows."""
    (row,) = held.rows
    place = held.caches.table.place(row)
    for layer in held.caches.layers:
        if layer is not None:
            read = layer.read(place, START, STOP)
            stated = [(shape.shape, shape.dtype) for shape in layer.shapes(START, STOP)]
            assert stated == [(tuple(array.shape), array.dtype) for array in read]

    shapes = shapes_of(held.caches)
    for part in Part:
        nbytes = sum(
            array.nbytes
            for layer in held.caches.layers
            if layer is not None and layer.kind in shapes.kinds(part)
            for array in layer.read(place, START, STOP)
        )
        assert shapes.nbytes(part, DEPTH) == nbytes <= shapes.nbytes_max


@pytest.mark.parametrize("key", [None, DiskKey(bytes(range(32)))], ids=["clear", "encrypted"])
def test_a_block_comes_back_bit_for_bit(held: Pair, key: DiskKey | None) -> None:
    """Entries of a range, cut out of snapshots that meet anywhere; a state as it is. Encrypted on
    the way, or not.
    """
    shapes = shapes_of(held.caches)
    snapshots = owned_by(held, 0)
    for part in Part:
        kinds = shapes.kinds(part)
        states: dict[Kind, tuple[LayerState, ...]] = {}
        for kind in kinds:
            whole = snapshots[kind]
            if part is Part.STATE:
                states[kind] = whole.layers
                continue
            left, right = whole.split(START + 5)
            assert left is not None
            assert right is not None
            cut_out = cut([left, right], START, STOP)
            assert cut_out is not None
            states[kind] = cut_out
            snapshots[kind] = right
            left.close()
        if not kinds:
            continue
        block = through_a_file(part, tensors_of(states), key=key)
        shapes.check(block)

        again = states_of(block, shapes)

        assert list(again) == list(kinds)
        for kind in kinds:
            assert bits(again[kind]) == bits(states[kind])
    for snapshot in snapshots.values():
        snapshot.close()
    assert held.caches.contents.book.live == 0


def test_arrays_are_copied_in_parts(held: Pair) -> None:
    """As many at once as the bytes allow, one at least; together they are those of one go."""
    for snapshot in owned_by(held, 0).values():
        states = {snapshot.kind: snapshot.layers}
        whole = tensors_of(states)
        assert len(whole) == count_arrays(states)
        most = 2 * max(tensor.nbytes for tensor in whole)
        for nbytes_max in (1, most):
            copied: list[Tensor] = []
            while len(copied) < len(whole):
                more = tensors_of(states, done=len(copied), nbytes_max=nbytes_max)
                assert len(more) == 1 or sum(tensor.nbytes for tensor in more) <= nbytes_max
                assert len(more) > 1 or nbytes_max == 1 or len(copied) == len(whole) - 1
                copied += more
            assert [(each.name, each.content) for each in copied] == [
                (each.name, each.content) for each in whole
            ]
        snapshot.close()


def test_a_row_goes_on_from_blocks(held: Pair) -> None:
    """A row that is restored from blocks reads what the naive reference says it must."""
    (row,) = held.rows
    shapes = shapes_of(held.caches)
    book = held.caches.contents.book
    snapshots = owned_by(held, 0)
    parts: list[Snapshot] = []
    for part in Part:
        for kind in shapes.kinds(part):
            depths = range(DEPTH + 1) if part is Part.ENTRIES else [DEPTH]
            for depth in depths:
                start, stop = depth * BLOCK_TOKENS, (depth + 1) * BLOCK_TOKENS
                layers = (
                    cut([snapshots[kind]], start, stop)
                    if part is Part.ENTRIES
                    else snapshots[kind].layers
                )
                assert layers is not None
                only = BlockShapes({kind: _layers(held, kind)}, block_tokens=BLOCK_TOKENS)
                block = replace(through_a_file(part, tensors_of({kind: layers})), depth=depth)
                (states,) = states_of(block, only).values()
                parts.append(book.add_owned(kind, start, stop, states))
    history = {kind: list(tags) for kind, tags in held.rows[row].history.items()}
    other = held.join(STOP + 40)
    assert other is not None

    assert held.caches.contents.restore(other, parts, STOP)
    held.rows[other].history = history
    held.append([other], 7)
    held.append([row, other], 1)

    for snapshot in (*parts, *snapshots.values()):
        snapshot.close()
    held.end()


def _layers(held: Pair, kind: Kind) -> list[LayerCache]:
    return [layer for layer in held.caches.layers if layer is not None and layer.kind is kind]


def test_only_what_is_whole_and_at_rest_is_cut() -> None:
    """Nothing of a range that is there in part, or that a running row holds."""
    held = pair(SUBJECTS[0])
    row = held.join(64)
    assert row is not None
    held.append([row], 60)
    contents = held.caches.contents
    snapshot = contents.snapshot(row, Kind.STANDARD, 10)
    assert snapshot is not None
    assert cut([snapshot], 16, 32) is None, "lazy"
    copy_out(snapshot)

    assert cut([snapshot], 0, 16) is None
    assert cut([snapshot], 48, 64) is None
    assert cut([], 0, 16) is None
    assert cut([snapshot], 16, 32) is not None
    left, right = snapshot.split(20)
    assert left is not None
    assert right is not None
    middle, last = right.split(24)
    assert middle is not None
    assert last is not None
    assert cut([left, last], 16, 32) is None, "a gap"
    assert cut([left, middle, last], 16, 32) is not None
    for each in (left, middle, last):
        each.close()


def test_a_block_with_other_tensors_is_refused() -> None:
    """One more, one less, another name, shape or type: none is made into arrays."""
    shapes = shapes_of(pair(SUBJECTS[0]).caches)
    specs = shapes.of(Part.ENTRIES, 0).items()
    good = tuple(
        Tensor(name, "F32", shape.shape, bytes(Tensor(name, "F32", shape.shape, b"").nbytes))
        for name, shape in specs
    )
    block = Block(b"f" * 32, b"b" * 32, bytes(4 * BLOCK_TOKENS), 0, Part.ENTRIES, good)
    shapes.check(block)

    first = good[0]
    bad = [
        good[1:],
        (*good, replace(first, name="standard.9.0")),
        (replace(first, name="latent.0.0"), *good[1:]),
        (replace(first, dtype="I32"), *good[1:]),
        (replace(first, shape=(*first.shape[:-1], 1, first.shape[-1])), *good[1:]),
        good[::-1],
        (),
    ]
    for tensors in bad:
        with pytest.raises(BlockRefused) as caught:
            shapes.check(replace(block, tensors=tensors))
        assert caught.value.fault is Fault.FOREIGN
    with pytest.raises(BlockRefused):
        shapes.check(replace(block, part=Part.STATE))


def test_whatever_layers_keep_tells_forms_apart() -> None:
    """Kind, width, type, bits, window, and which layer has which."""
    plain = AttentionGeometry(kv_heads=2, head_dim=64)
    described = [
        describe_layers([geometry.new_cache(dtype, kv=kv, context_max=1024), None])
        for geometry, dtype, kv in [
            (plain, mx.float32, KVFormat.MODEL),
            (plain, mx.bfloat16, KVFormat.MODEL),
            (plain, mx.float16, KVFormat.MODEL),
            (plain, mx.float32, KVFormat.Q8),
            (plain, mx.float32, KVFormat.Q4),
            (replace(plain, kv_heads=1), mx.float32, KVFormat.MODEL),
            (replace(plain, value_dim=32), mx.float32, KVFormat.MODEL),
            (replace(plain, window=128), mx.float32, KVFormat.MODEL),
            (replace(plain, window=256), mx.float32, KVFormat.MODEL),
            (replace(plain, latent_dim=32), mx.float32, KVFormat.MODEL),
        ]
    ]
    first = plain.new_cache(mx.float32, kv=KVFormat.MODEL, context_max=1024)
    described += [describe_layers([None, first]), describe_layers([first]), describe_layers([])]

    assert len(set(described)) == len(described)
