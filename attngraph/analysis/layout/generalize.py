"""Regions of large static sizes, read as regions of any size.

Every large axis of a leaf becomes an unknown of its own (any_size.py), and the nodes are followed
to see which sizes go together: a product's summed axes, what is added, the dims of a reshape. What
an operator isn't known to do with its sizes keeps them as they are. The sizes among the attributes
follow. Evaluated at some small sizes, a node whose result has another shape than was read here
ends the trial (regions.py), so that a wrong reading costs time and proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from attngraph.analysis.layout.any_size import Sizes
from attngraph.analysis.layout.moves import permutation
from attngraph.ir import Dim, DimInfo, Node, ScalarType, Value
from attngraph.ir.dims import as_dim, product
from attngraph.ir.ops import attribute, input_of
from attngraph.ir.traits import (
    ANY_CONVOLUTION,
    ATTENTION,
    LINEAR,
    OPAQUE,
    PAD,
    PERMUTE,
    RECURRENCE,
    REDUCTION,
    REPEAT,
    RESHAPE,
    ROLL,
    SCATTER,
)

Shape: TypeAlias = tuple[Dim, ...]
_FEWEST = 3  # the least size that an axis gets: 1 broadcasts, and 2 has one neighbour each


@dataclass(frozen=True)
class Generalized:
    """The shapes of all values of a region, and the attributes of its nodes, over more dims."""

    shapes: Mapping[Value, Shape]
    attrs: Mapping[Node, Mapping[str, Any]]
    infos: Mapping[str, DimInfo]


def generalized(
    leaves: Iterable[Value],
    nodes: Sequence[Node],
    pairs: Iterable[tuple[Value, Value]],
    kept: Collection[Value],
    dims: Iterable[str],
) -> Generalized | None:
    """A region with unknowns in the place of large sizes; None where none is left.

    The values of each pair have one shape. The leaves in `kept` keep their sizes. `dims` are the
    graph's own.
    """
    reader = _Reader(Sizes(dims))
    for value in leaves:
        if isinstance(value.type, ScalarType):
            return None
        shape = value.shape if value in kept else tuple(map(reader.sizes.fresh, value.shape))
        reader.shapes[value] = shape
    for node in nodes:
        if any(isinstance(value.type, ScalarType) for value in node.outputs):
            return None
        reader.read(node)
    sizes = reader.sizes
    for old, new in pairs:
        for first, second in zip(reader.shapes[old], reader.shapes[new], strict=True):
            sizes.unify(first, second)
    if not sizes.unknowns:
        return None
    return Generalized(
        {value: sizes.resolved(shape) for value, shape in reader.shapes.items()},
        {node: sizes.resolved(attrs) for node, attrs in reader.resolved_attrs()},
        sizes.infos(_FEWEST),
    )


class _Reader:
    """The shapes of what was read so far."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.shapes: dict[Value, Shape] = {}
        self.attrs: dict[Node, dict[str, Any]] = {}
        self.queries: dict[Value, Dim] = {}

    def resolved_attrs(self) -> Iterable[tuple[Node, Any]]:
        for node, attrs in self.attrs.items():
            yield node, {name: self.sizes.resolved(value) for name, value in attrs.items()}

    def read(self, node: Node) -> None:
        given = [v for v in node.inputs if v is not None]
        rule = _rule_of(node.op)
        try:
            found = rule(self, node)
        except (ValueError, TypeError, AttributeError, IndexError):
            found = None  # an operand or attribute that the rule doesn't expect
        if found is None or not self._fits(node, found):
            self.sizes.pin([list(self.shapes[value]) for value in given])
            self.attrs.pop(node, None)
            found = [value.shape for value in node.outputs]
        self.shapes.update(zip(node.outputs, found, strict=True))

    def _fits(self, node: Node, found: Sequence[Shape]) -> bool:
        """Whether these are the shapes that the graph says, as far as numbers tell."""
        number = self.sizes.number
        return len(found) == len(node.outputs) and all(
            [number(dim) for dim in shape] == [number(dim) for dim in value.shape]
            for shape, value in zip(found, node.outputs, strict=True)
        )

    def shape(self, value: Value | None) -> Shape:
        if value is None:
            raise ValueError
        return self.shapes[value]

    def of(self, node: Node, name: str) -> Shape:
        """The shape of a tensor argument. Raises ValueError where it is absent."""
        return self.shape(input_of(node, name))

    def set(self, node: Node, **attrs: Any) -> None:
        self.attrs.setdefault(node, {}).update(attrs)

    def broadcast(self, shapes: Sequence[Shape], rank: int) -> Shape | None:
        """The shape of an elementwise result; None where the shapes don't broadcast."""
        result: list[Dim] = []
        for place in range(1, rank + 1):
            there = [shape[-place] for shape in shapes if len(shape) >= place]
            wide = [dim for dim in there if self.sizes.number(dim) != 1]
            if len({self.sizes.number(dim) for dim in wide}) > 1:
                return None
            for dim in wide[1:]:
                self.sizes.unify(wide[0], dim)
            result.append(wide[0] if wide else 1)
        return tuple(reversed(result))


Rule: TypeAlias = Callable[[_Reader, Node], Sequence[Shape] | None]
_RULES: dict[str, Rule] = {}


# Where they have no rule: ops whose results have a size of their own, or whose attributes count.
_SIZED = SCATTER | PAD | ROLL | REPEAT | ANY_CONVOLUTION | RECURRENCE | ATTENTION | LINEAR | OPAQUE


def _rule_of(op: str) -> Rule:
    if op in _RULES:
        return _RULES[op]
    if op in REDUCTION:
        return _reduced
    return _kept if op in _SIZED else _elementwise


def _kept(reader: _Reader, node: Node) -> None:
    """An op whose result has a size of its own, or whose attributes count elements."""
    return


def _on(*ops: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update((op, rule) for op in ops)
        return rule

    return register


def _elementwise(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    """Whatever has the shape to which its operands broadcast."""
    shapes = [reader.shapes[value] for value in node.inputs if value is not None]
    if not shapes:
        return None
    found = reader.broadcast(shapes, max(map(len, shapes)))
    return None if found is None else [found] * len(node.outputs)


@_on("aten.layer_norm")
def _layer_norm(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    found = _elementwise(reader, node)
    if found is not None:
        reader.set(node, normalized_shape=found[0][-len(attribute(node, "normalized_shape")) :])
    return found


@_on(*PERMUTE)
def _permute(reader: _Reader, node: Node) -> Sequence[Shape]:
    shape = reader.of(node, "self")
    return [tuple(shape[dim] for dim in permutation(node, len(shape)))]


@_on(*RESHAPE)
def _reshape(reader: _Reader, node: Node) -> Sequence[Shape]:
    found = reader.sizes.regrouped(reader.of(node, "self"), node.output.shape)
    for name in {"shape", "size"} & node.attrs.keys():
        reader.set(node, **{name: list(found)})
    if node.op == "aten.unflatten.int":
        dim, count = attribute(node, "dim"), len(attribute(node, "sizes"))
        dim %= len(reader.of(node, "self"))
        reader.set(node, sizes=list(found[dim : dim + count]))
    return [found]


@_on("aten.expand")
def _expand(reader: _Reader, node: Node) -> Sequence[Shape]:
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


@_on("aten.view_as_complex", "aten.view_as_real")
def _complex(reader: _Reader, node: Node) -> Sequence[Shape]:
    shape = reader.of(node, "self")
    return [(*shape, 2) if node.op == "aten.view_as_real" else shape[:-1]]


@_on("aten.select.int")
def _select(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    shape = list(reader.of(node, "self"))
    index = attribute(node, "index")
    if not isinstance(index, int) or not -_FEWEST <= index < _FEWEST:
        return None
    del shape[attribute(node, "dim")]
    return [tuple(shape)]


@_on("aten.unbind.int")
def _unbind(reader: _Reader, node: Node) -> Sequence[Shape]:
    shape = list(reader.of(node, "self"))
    reader.sizes.pin(shape.pop(attribute(node, "dim")))
    return [tuple(shape)] * len(node.outputs)


@_on("aten.slice.Tensor")
def _slice(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    shape, dim = reader.of(node, "self"), attribute(node, "dim")
    size, length = (reader.sizes.number(item[dim]) for item in (shape, node.output.shape))
    start, end = attribute(node, "start") or 0, attribute(node, "end")
    if length == size:
        return [shape]
    if attribute(node, "step") == 1 and isinstance(start, int) and isinstance(end, int | None):
        start = start + size if start < 0 else start
        if start < _FEWEST and size - start - length < _FEWEST:  # a few at either end are cut off
            cut = length + start - size
            reader.set(node, start=start, end=_shifted(shape[dim], cut))
            return [_with(shape, dim, _shifted(shape[dim], cut - start))]
        if start == 0:  # the head of a table: any length of it
            part = reader.sizes.fresh(length)
            _at_most(reader, part, shape[dim])
            reader.set(node, end=part)
            return [_with(shape, dim, part)]
    reader.sizes.pin(shape[dim])
    return [_with(shape, dim, node.output.shape[dim])]


def _at_most(reader: _Reader, part: Dim, whole: Dim) -> None:
    """A whole is its part and a rest of any size."""
    rest = reader.sizes.fresh(reader.sizes.number(whole) - reader.sizes.number(part))
    reader.sizes.unify(whole, as_dim(sympy.expand(sympy.sympify(part) + rest)))


def _shifted(dim: Dim, by: int) -> Dim:
    return as_dim(sympy.expand(sympy.sympify(dim) + by))


@_on("aten.split_with_sizes", "aten.split.Tensor", "aten.chunk")
def _split(reader: _Reader, node: Node) -> Sequence[Shape] | None:
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
    return [_with(shape, dim, part) for part in found]


def _with(shape: Shape, dim: int, size: Dim) -> Shape:
    place = dim % len(shape)
    return (*shape[:place], size, *shape[place + 1 :])


@_on("aten.cat")
def _cat(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    shapes, dim = [reader.shape(value) for value in node.inputs], attribute(node, "dim")
    if len({len(shape) for shape in shapes}) > 1:
        return None
    joined = as_dim(sympy.expand(sympy.Add(*(sympy.sympify(shape[dim]) for shape in shapes))))
    others = reader.broadcast([_with(shape, dim, 1) for shape in shapes], len(shapes[0]))
    return None if others is None else [_with(others, dim, joined)]


@_on("aten.stack")
def _stack(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    shapes = [reader.shape(value) for value in node.inputs]
    found = reader.broadcast(shapes, len(shapes[0]))
    if found is None:
        return None
    dim = attribute(node, "dim") % (len(found) + 1)
    return [(*found[:dim], len(shapes), *found[dim:])]


@_on("aten.repeat_interleave.self_int")
def _repeat_interleave(reader: _Reader, node: Node) -> Sequence[Shape]:
    shape, dim, times = reader.of(node, "self"), attribute(node, "dim"), attribute(node, "repeats")
    return [_with(shape, dim, product([shape[dim], times]))]


@_on("aten.matmul", "aten.mm", "aten.bmm")
def _matmul(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    left, right = (reader.shape(value) for value in node.inputs)
    if len(left) < 2 or len(right) < 2:
        return None
    return _product(reader, left, right)


def _product(reader: _Reader, left: Shape, right: Shape) -> Sequence[Shape] | None:
    reader.sizes.unify(left[-1], right[-2])
    lead = reader.broadcast([left[:-2], right[:-2]], max(len(left), len(right)) - 2)
    return None if lead is None else [(*lead, left[-2], right[-1])]


@_on("aten.linear")
def _linear(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    source, weight = reader.of(node, "input"), reader.of(node, "weight")
    reader.sizes.unify(source[-1], weight[-1])
    if input_of(node, "bias") is not None:
        reader.sizes.unify(weight[0], reader.of(node, "bias")[0])
    return [(*source[:-1], weight[0])]


@_on("aten.addmm", "aten.baddbmm")
def _addmm(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    added, left, right = (reader.shape(value) for value in node.inputs)
    found = _product(reader, left, right)
    if found is None or len(added) > len(found[0]):
        return None
    whole = reader.broadcast([found[0], added], len(found[0]))
    return None if whole is None else [whole]


@_on("aten.einsum")
def _einsum(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    terms, _, result = attribute(node, "equation").replace(" ", "").partition("->")
    if "." in terms or not result:
        return None
    sizes: dict[str, Dim] = {}
    for labels, value in zip(terms.split(","), node.inputs, strict=True):
        for label, dim in zip(labels, reader.shape(value), strict=True):
            if reader.sizes.number(sizes.get(label, 1)) == 1:
                sizes[label] = dim
            elif reader.sizes.number(dim) != 1:
                reader.sizes.unify(sizes[label], dim)
    return [tuple(sizes[label] for label in result)]


def _reduced(reader: _Reader, node: Node) -> Sequence[Shape] | None:
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


@_on("aten.arange")
def _arange(reader: _Reader, node: Node) -> Sequence[Shape]:
    end = reader.sizes.fresh(node.output.shape[0])
    reader.set(node, end=end)
    return [(end,)]


@_on("aten.full", "aten.zeros", "aten.ones", "aten.empty.memory_format")
def _filled(reader: _Reader, node: Node) -> Sequence[Shape]:
    found = tuple(map(reader.sizes.fresh, node.output.shape))
    reader.set(node, size=list(found))
    return [found]


@_on("aten.new_zeros", "aten.new_ones", "aten.new_full")
def _new_filled(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    return _filled(reader, node)


@_on("aten.embedding")
def _embedding(reader: _Reader, node: Node) -> Sequence[Shape]:
    return [(*reader.of(node, "indices"), *reader.of(node, "weight")[1:])]


@_on("aten.index_select")
def _index_select(reader: _Reader, node: Node) -> Sequence[Shape]:
    (count,) = reader.of(node, "index")
    return [_with(reader.of(node, "self"), attribute(node, "dim"), count)]


@_on("aten.gather")
def _gather(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    source, index = reader.of(node, "self"), reader.of(node, "index")
    place = attribute(node, "dim") % len(source)
    for dim, (first, second) in enumerate(zip(source, index, strict=True)):
        if dim != place:
            if reader.sizes.number(first) != reader.sizes.number(second):
                return None
            reader.sizes.unify(first, second)
    return [index]


@_on("aten.index.Tensor")
def _index(reader: _Reader, node: Node) -> Sequence[Shape] | None:
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


def _unify_counted(reader: _Reader, index: Value, size: Dim) -> None:
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


@_on("aten.scaled_dot_product_attention")
def _sdpa(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    query, key, value = (reader.of(node, name) for name in ("query", "key", "value"))
    sizes = reader.sizes
    sizes.unify(query[-1], key[-1])
    sizes.unify(key[-2], value[-2])
    for place in range(len(query) - 2):
        if sizes.number(query[place]) == sizes.number(key[place]):
            sizes.unify(query[place], key[place])
        if sizes.number(key[place]) == sizes.number(value[place]):
            sizes.unify(key[place], value[place])
    if input_of(node, "attn_mask") is not None:
        scores = (*query[:-1], key[-2])
        if reader.broadcast([scores, reader.of(node, "attn_mask")], len(scores)) is None:
            return None
    return [(*query[:-1], value[-1])]


@_on("attn.attention")
def _attention(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    query, key, value = (reader.of(node, name) for name in ("query", "key", "value"))
    heads, kv_heads = attribute(node, "heads"), attribute(node, "kv_heads")
    sizes = reader.sizes
    head, out = (sizes.fresh(sizes.number(shape[-1]) // kv_heads) for shape in (key, value))
    sizes.unify(query[-1], product([heads, head]))
    sizes.unify(key[-1], product([kv_heads, head]))
    sizes.unify(value[-1], product([kv_heads, out]))
    for other in (key, value):
        sizes.unify(query[0], other[0])
    sizes.unify(key[1], value[1])
    keys, rest = key[1], list[Shape]()
    if input_of(node, "past_key") is not None:
        pasts = [reader.of(node, name) for name in ("past_key", "past_value")]
        for past, width in zip(pasts, (head, out), strict=True):
            sizes.unify(past[0], query[0])
            sizes.unify(past[1], kv_heads)
            sizes.unify(past[2], pasts[0][2])
            sizes.unify(past[3], width)
        keys = as_dim(sympy.expand(sympy.sympify(keys) + pasts[0][2]))
        rest = [(query[0], kv_heads, keys, width) for width in (head, out)]
    scores = (query[0], heads, query[1], keys)
    for name in ("bias", "mask"):
        if input_of(node, name) is not None:
            shape = reader.of(node, name)
            if len(shape) > 4 or reader.broadcast([scores, shape], 4) is None:
                return None
    for name in ("sinks", "lengths"):
        if input_of(node, name) is not None:
            sizes.pin(list(reader.of(node, name)))
    weights = [scores] if attribute(node, "weights") else []
    return [(*query[:2], product([heads, out])), *weights, *rest]


@_on("attn.masked_softmax")
def _masked_softmax(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    logits = reader.of(node, "logits")
    given = [reader.shape(value) for value in node.inputs[1:3] if value is not None]
    scores = node.inputs[0]
    if scores is None or attribute(node, "past"):
        return None
    # Both sides of a comparison read one tensor of scores, of as many queries.
    if scores not in reader.queries:
        reader.queries[scores] = reader.sizes.fresh(attribute(node, "queries"))
    queries = reader.queries[scores]
    rows = [(*logits[:2], queries, logits[3]), *given]
    if input_of(node, "lengths") is not None:
        rows.append((*reader.of(node, "lengths"), 1, 1, 1))
    found = reader.broadcast(rows, 4)
    reader.set(node, queries=queries)
    return None if found is None else [(*found[:2], *logits[2:])]


@_on("attn.rotary")
def _rotary(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    x, cos, sin = (reader.of(node, name) for name in ("x", "cos", "sin"))
    reader.sizes.pin([x[-1], cos[-1], sin[-1]])
    rows = reader.broadcast([x[:-1], cos[:-1], sin[:-1]], len(x) - 1)
    return None if rows is None else [(*rows, x[-1])]


@_on("aten.conv2d")
def _patches(reader: _Reader, node: Node) -> Sequence[Shape] | None:
    """A convolution whose steps are as wide as its kernel: each patch by itself."""
    image, weight = reader.of(node, "input"), reader.of(node, "weight")
    kernel = [reader.sizes.number(dim) for dim in weight[2:]]
    reader.sizes.pin(list(weight))
    stride, padding = attribute(node, "stride"), attribute(node, "padding")
    plain = list(stride) == kernel and not any(padding) and attribute(node, "groups") == 1
    if not plain or list(attribute(node, "dilation")) != [1] * len(kernel):
        return None
    found = []
    for dim, step in zip(image[2:], kernel, strict=True):
        count = reader.sizes.number(dim) // step
        if count * step != reader.sizes.number(dim):
            return None
        part = reader.sizes.fresh(count)
        reader.sizes.unify(dim, product([part, step]))
        found.append(part)
    reader.sizes.unify(image[1], weight[1])
    return [(image[0], weight[0], *found)]
