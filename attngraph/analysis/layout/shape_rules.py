"""Shapes with unknown sizes: layouts, reductions, creations and gathers."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from attngraph.analysis.layout.moves import permutation
from attngraph.analysis.layout.shape_reader import (
    FEWEST,
    Reader,
    Rules,
    Shape,
    elementwise,
    with_size,
)
from attngraph.ir import Dim, Node, Value
from attngraph.ir.dims import as_dim, product
from attngraph.ir.ops import attribute
from attngraph.ir.traits import PAD, PERMUTE, RESHAPE

SHAPES = Rules()


@SHAPES.on("aten.layer_norm")
def _layer_norm(reader: Reader, node: Node) -> Sequence[Shape] | None:
    found = elementwise(reader, node)
    if found is not None:
        reader.set(node, normalized_shape=found[0][-len(attribute(node, "normalized_shape")) :])
    return found


@SHAPES.on(*PERMUTE)
def _permute(reader: Reader, node: Node) -> Sequence[Shape]:
    shape = reader.of(node, "self")
    return [tuple(shape[dim] for dim in permutation(node, len(shape)))]


@SHAPES.on(*RESHAPE)
def _reshape(reader: Reader, node: Node) -> Sequence[Shape]:
    found = reader.sizes.regrouped(reader.of(node, "self"), node.output.shape)
    for name in {"shape", "size"} & node.attrs.keys():
        reader.set(node, **{name: list(found)})
    if node.op == "aten.unflatten.int":
        dim, count = attribute(node, "dim"), len(attribute(node, "sizes"))
        dim %= len(reader.of(node, "self"))
        reader.set(node, sizes=list(found[dim : dim + count]))
    return [found]


@SHAPES.on("aten.expand")
def _expand(reader: Reader, node: Node) -> Sequence[Shape]:
    shape, wanted = reader.of(node, "self"), list(node.output.shape)
    lead = len(wanted) - len(shape)
    found = tuple(
        dim
        if place < lead or reader.sizes.number(shape[place - lead]) == 1
        else shape[place - lead]
        for place, dim in enumerate(map(reader.sizes.fresh, wanted))
    )
    reader.set(node, size=list(found))
    return [found]


@SHAPES.on("aten.view_as_complex", "aten.view_as_real")
def _complex(reader: Reader, node: Node) -> Sequence[Shape]:
    shape = reader.of(node, "self")
    return [(*shape, 2) if node.op == "aten.view_as_real" else shape[:-1]]


@SHAPES.on("aten.select.int")
def _select(reader: Reader, node: Node) -> Sequence[Shape] | None:
    shape = list(reader.of(node, "self"))
    _place_of(reader, node, shape.pop(attribute(node, "dim")))
    return [tuple(shape)]


def _place_of(reader: Reader, node: Node, size: Dim) -> None:
    """An axis has the place that a node names by a number: its own size, but for the first few."""
    index = attribute(node, "index")
    if not isinstance(index, int) or not -FEWEST <= index < FEWEST:
        reader.sizes.pin(size)


@SHAPES.on("aten.select_scatter")
def _select_scatter(reader: Reader, node: Node) -> Sequence[Shape] | None:
    whole, part = reader.of(node, "self"), list(reader.of(node, "src"))
    dim = attribute(node, "dim") % len(whole)
    _place_of(reader, node, whole[dim])
    part.insert(dim, whole[dim])
    return _written_over(reader, whole, part)


@SHAPES.on("aten.slice_scatter")
def _slice_scatter(reader: Reader, node: Node) -> Sequence[Shape] | None:
    whole, part = reader.of(node, "self"), reader.of(node, "src")
    dim = attribute(node, "dim") % len(whole)
    reader.sizes.pin([whole[dim], part[dim]])
    return _written_over(reader, whole, with_size(part, dim, whole[dim]))


def _written_over(reader: Reader, whole: Shape, part: Sequence[Dim]) -> Sequence[Shape] | None:
    for first, second in zip(whole, part, strict=True):
        if reader.sizes.number(first) != reader.sizes.number(second):
            return None
        reader.sizes.unify(first, second)
    return [whole]


@SHAPES.on(*PAD)
def _pad(reader: Reader, node: Node) -> Sequence[Shape]:
    """An axis that gets something keeps its own size."""
    shape, pad = list(reader.of(node, "self")), attribute(node, "pad")
    for back, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), 1):
        if (before, after) != (0, 0):
            reader.sizes.pin(shape[-back])
            shape[-back] = node.output.shape[-back]
    return [tuple(shape)]


@SHAPES.on("aten.unbind.int")
def _unbind(reader: Reader, node: Node) -> Sequence[Shape]:
    shape = list(reader.of(node, "self"))
    reader.sizes.pin(shape.pop(attribute(node, "dim")))
    return [tuple(shape)] * len(node.outputs)


@SHAPES.on("aten.slice.Tensor")
def _slice(reader: Reader, node: Node) -> Sequence[Shape] | None:
    shape, dim = reader.of(node, "self"), attribute(node, "dim")
    size, length = (reader.sizes.number(item[dim]) for item in (shape, node.output.shape))
    start, end = attribute(node, "start") or 0, attribute(node, "end")
    if length == size:
        return [shape]
    if attribute(node, "step") == 1 and isinstance(start, int) and isinstance(end, int | None):
        start = start + size if start < 0 else start
        if start < FEWEST and size - start - length < FEWEST:  # a few at either end are cut off
            cut = length + start - size
            reader.set(node, start=start, end=_shifted(shape[dim], cut))
            return [with_size(shape, dim, _shifted(shape[dim], cut - start))]
        if start == 0:  # the head of a table: any length of it
            part = reader.sizes.fresh(length)
            _at_most(reader, part, shape[dim])
            reader.set(node, end=part)
            return [with_size(shape, dim, part)]
    reader.sizes.pin(shape[dim])
    return [with_size(shape, dim, node.output.shape[dim])]


def _at_most(reader: Reader, part: Dim, whole: Dim) -> None:
    """A whole is its part and a rest of any size."""
    rest = reader.sizes.fresh(reader.sizes.number(whole) - reader.sizes.number(part))
    reader.sizes.unify(whole, as_dim(sympy.expand(sympy.sympify(part) + rest)))


def _shifted(dim: Dim, by: int) -> Dim:
    return as_dim(sympy.expand(sympy.sympify(dim) + by))


@SHAPES.on("aten.split_with_sizes", "aten.split.Tensor", "aten.chunk")
def _split(reader: Reader, node: Node) -> Sequence[Shape] | None:
    shape, dim = reader.of(node, "self"), attribute(node, "dim")
    parts = [value.shape[dim] for value in node.outputs]
    if node.op != "aten.split_with_sizes":
        if any(part != parts[0] for part in parts):
            return None
        part = reader.sizes.fresh(parts[0])
        found = [part] * len(parts)
        if node.op == "aten.split.Tensor":
            reader.set(node, split_size=part)
    else:
        fresh: dict[Dim, Dim] = {}
        found = [fresh.setdefault(part, reader.sizes.fresh(part)) for part in parts]
        reader.set(node, split_sizes=found)
    reader.sizes.unify(shape[dim], as_dim(sympy.expand(sympy.Add(*found))))
    return [with_size(shape, dim, part) for part in found]


@SHAPES.on("aten.cat")
def _cat(reader: Reader, node: Node) -> Sequence[Shape] | None:
    shapes, dim = [reader.shape(value) for value in node.inputs], attribute(node, "dim")
    if len({len(shape) for shape in shapes}) > 1:
        return None
    joined = as_dim(sympy.expand(sympy.Add(*(sympy.sympify(shape[dim]) for shape in shapes))))
    others = reader.broadcast([with_size(shape, dim, 1) for shape in shapes], len(shapes[0]))
    return None if others is None else [with_size(others, dim, joined)]


@SHAPES.on("aten.stack")
def _stack(reader: Reader, node: Node) -> Sequence[Shape] | None:
    shapes = [reader.shape(value) for value in node.inputs]
    found = reader.broadcast(shapes, len(shapes[0]))
    if found is None:
        return None
    dim = attribute(node, "dim") % (len(found) + 1)
    return [(*found[:dim], len(shapes), *found[dim:])]


@SHAPES.on("aten.repeat_interleave.self_int")
def _repeat_interleave(reader: Reader, node: Node) -> Sequence[Shape]:
    shape, dim, times = reader.of(node, "self"), attribute(node, "dim"), attribute(node, "repeats")
    return [with_size(shape, dim, product([shape[dim], times]))]


def reduced(reader: Reader, node: Node) -> Sequence[Shape] | None:
    """A reduction over `dim`, or over all axes."""
    shape = reader.shape(node.inputs[0])
    dims = node.attrs.get("dim")
    if dims is None or dims == []:
        return [()] * len(node.outputs) if not node.output.shape else None
    places = {dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims)}
    kept = bool(node.attrs.get("keepdim"))
    found = tuple(
        1 if place in places else dim
        for place, dim in enumerate(shape)
        if kept or place not in places
    )
    return [found] * len(node.outputs)


@SHAPES.on("aten.arange")
def _arange(reader: Reader, node: Node) -> Sequence[Shape]:
    end = reader.sizes.fresh(node.output.shape[0])
    reader.set(node, end=end)
    return [(end,)]


@SHAPES.on("aten.full", "aten.zeros", "aten.ones", "aten.empty.memory_format")
def _filled(reader: Reader, node: Node) -> Sequence[Shape]:
    found = tuple(map(reader.sizes.fresh, node.output.shape))
    reader.set(node, size=list(found))
    return [found]


@SHAPES.on("aten.new_zeros", "aten.new_ones", "aten.new_full")
def _new_filled(reader: Reader, node: Node) -> Sequence[Shape] | None:
    return _filled(reader, node)


@SHAPES.on("aten.embedding")
def _embedding(reader: Reader, node: Node) -> Sequence[Shape]:
    return [(*reader.of(node, "indices"), *reader.of(node, "weight")[1:])]


@SHAPES.on("aten.index_select")
def _index_select(reader: Reader, node: Node) -> Sequence[Shape]:
    (count,) = reader.of(node, "index")
    return [with_size(reader.of(node, "self"), attribute(node, "dim"), count)]


@SHAPES.on("aten.gather")
def _gather(reader: Reader, node: Node) -> Sequence[Shape] | None:
    source, index = reader.of(node, "self"), reader.of(node, "index")
    place = attribute(node, "dim") % len(source)
    for dim, (first, second) in enumerate(zip(source, index, strict=True)):
        if dim != place:
            if reader.sizes.number(first) != reader.sizes.number(second):
                return None
            reader.sizes.unify(first, second)
    return [index]


@SHAPES.on("aten.index.Tensor")
def _index(reader: Reader, node: Node) -> Sequence[Shape] | None:
    source = reader.shape(node.inputs[0])
    indices = node.inputs[1:]
    if any(value is not None and not _is_integer(value) for value in indices):
        return None
    places = [place for place, value in enumerate(indices) if value is not None]
    if not places or places != list(range(places[0], places[-1] + 1)):
        return None
    for place in places:
        if (index := indices[place]) is not None:
            _unify_counted(reader, index, source[place])
    shapes = [reader.shape(indices[place]) for place in places]
    found = reader.broadcast(shapes, max(map(len, shapes)))
    return None if found is None else [(*source[: places[0]], *found, *source[places[-1] + 1 :])]


def _unify_counted(reader: Reader, index: Value, size: Dim) -> None:
    """A constant 0, 1, 2 … that runs over a whole axis has as many elements as that."""
    count = reader.sizes.number(size)
    if index.data is None or index.data.is_meta or index.data.numel() != count:
        return
    if torch.equal(index.data.flatten().long(), torch.arange(count)):
        for dim in reader.shape(index):
            if reader.sizes.number(dim) == count:
                reader.sizes.unify(dim, size)


def _is_integer(value: Value) -> bool:
    return not value.dtype.is_floating_point and value.dtype.itemsize > 1
