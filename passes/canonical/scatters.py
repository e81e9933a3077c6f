"""Rules for tensors written part by part, as a loop over heads does: `out[:, :, h] = …`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attngraph.analysis.layout.axes import Operand, climb, fresh_axes, resolve
from attngraph.analysis.layout.moves import Cut, counted_start, move_of
from attngraph.analysis.values.matching import same_type
from attngraph.ir import Dim, Node, TensorType, Value
from attngraph.ir.dims import as_dim, same, same_shape
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.passes.rewriting.rewriter import Replacement, Rewriter, rule

_SCATTERS = ("aten.select_scatter", "aten.slice_scatter")
_LONGEST = 16  # sums and layouts of one assignment


@rule(*_SCATTERS)
def scatters(rewriter: Rewriter, node: Node) -> Replacement:
    """A tensor whose every part along an axis is written is the concatenation of these."""
    kind = node.output.tensor_type
    dim = attribute(node, "dim") % kind.rank
    if node.op == "aten.slice_scatter" and attribute(node, "step") == 1:
        written: Value = input_of(node, "src")
        if attribute(node, "start") in (None, 0) and same_type(written, node.output):
            return written  # from the first place on, as many as there are
    size = kind.shape[dim]
    parts: dict[int, tuple[Value, int]] = {}
    chain: list[Node] = []
    above: Node | None = node
    while above is not None and above.op in _SCATTERS and isinstance(size, int):
        part = _written(above, dim, size)
        if part is None:
            return None
        start, end, source = part
        held = parts.setdefault(start, (source, end))
        if held[1] != end or source.dtype != kind.dtype:
            return None
        chain.append(above)
        if _covers(parts, size):
            return _joined(rewriter, node, dim, [parts[at][0] for at in sorted(parts)], chain[1:])
        above = above.source.producer
    return None


@rule(*_SCATTERS)
def shifted(rewriter: Rewriter, node: Node) -> Replacement:
    """A tensor that is rolled, and written where it wrapped round, is the rest and what is written.

    So a window of the last inputs moves on: `window = window.roll(-1, -1); window[..., -1] = x`.
    """
    rolled = node.source.producer
    if rolled is None or rolled.op != "aten.roll":
        return None
    kind = node.output.tensor_type
    dim = attribute(node, "dim") % kind.rank
    size = kind.shape[dim]
    part = _written(node, dim, size) if isinstance(size, int) else None
    dims = [each % kind.rank for each in attribute(rolled, "dims") or ()]
    if part is None or dims != [dim] or not isinstance(size, int):
        return None
    start, end, source = part
    (by,) = attribute(rolled, "shifts")
    length = end - start
    at_end, at_front = (by, end) == (-length, size), (by, start) == (length, 0)
    if not 0 < length < size or not (at_end or at_front) or source.dtype != kind.dtype:
        return None
    cut = {"dim": dim, "start": length} if at_end else {"dim": dim, "end": size - length}
    left = [TensorType(kind.dtype, (*kind.shape[:dim], size - length, *kind.shape[dim + 1 :]))]
    rest = rewriter.emit("aten.slice.Tensor", [rolled.source], cut, at=node, types=left)[0]
    parts = [rest, source] if at_end else [source, rest]
    return _joined(rewriter, node, dim, parts, [rolled])


def _written(node: Node, dim: int, size: int) -> tuple[int, int, Value] | None:
    """(start, end, source) of what a scatter writes along a dim."""
    if attribute(node, "dim") % len(node.output.shape) != dim:
        return None
    source = input_of(node, "src")
    if node.op == "aten.select_scatter":
        start = attribute(node, "index")
        length = 1
    else:
        start = attribute(node, "start") or 0
        length = source.shape[dim]
        if attribute(node, "step") != 1:
            return None
    if not isinstance(start, int) or not isinstance(length, int):
        return None
    start += size if start < 0 else 0
    return start, start + length, source


def _covers(parts: dict[int, tuple[Value, int]], size: int) -> bool:
    """Whether the parts follow each other from 0 to `size`."""
    at = 0
    for start in sorted(parts):
        if start != at:
            return False
        at = parts[start][1]
    return at == size


def _joined(
    rewriter: Rewriter, node: Node, dim: int, values: list[Value], above: list[Node]
) -> Replacement:
    shape = node.output.shape
    parts = []
    for value in values:
        if len(value.shape) < len(shape):  # one place
            wide = (*shape[:dim], 1, *shape[dim + 1 :])
            kind = [TensorType(value.dtype, wide)]
            attrs = {"shape": list(wide)}
            value = rewriter.emit("aten.reshape", [value], attrs, at=node, types=kind)[0]
        parts.append(value)
    return rewriter.emit("aten.cat", parts, {"dim": dim}, at=node, fused=above)


@rule("aten.slice_scatter")
def added_in_part(rewriter: Rewriter, node: Node) -> Replacement:
    """`x[…, 1:] += d` is x + d padded by −0, which changes no number, not even −0."""
    x, written = node.source, input_of(node, "src")
    padding = _padding(node, attribute(node, "start") or 0, written)
    if padding is None or attribute(node, "step") != 1 or not _are_floats([x, written]):
        return None
    path = _path_to_part(written, lambda value: _is_part(value, node))
    return None if path is None else _added(rewriter, node, x, path, padding)


@rule("aten.cat")
def added_in_joined_part(rewriter: Rewriter, node: Node) -> Replacement:
    """cat(x[:1], x[1:] + d) is x + d padded by −0, along any axis and for any of its parts."""
    parts: list[Value] = input_of(node, "tensors")
    if not _are_floats(parts):
        return None
    dim = attribute(node, "dim") % len(node.output.shape)
    end: Dim = 0
    wholes: list[Value] = []
    found: list[tuple[list[tuple[Node, Value | None]], list[Dim]]] = []
    for part in parts:
        path = _path_to_part(part, partial(_starts, dim=dim, first=end, found=wholes))
        if path is None or not _is_same(wholes[-1], wholes[0]):
            return None
        if any(added is not None for _, added in path):
            padding = _padding(node, end, part)
            if padding is None:
                return None
            found.append((path, padding))
        end = as_dim(end + part.shape[dim])
    if not found or not same_type(wholes[0], node.output):
        return None
    x = wholes[0]
    for path, padding in found:
        x = _added(rewriter, node, x, path, padding)
    return x


def _are_floats(values: list[Value]) -> bool:
    return len({value.dtype for value in values}) == 1 and values[0].dtype.is_floating_point


def _added(
    rewriter: Rewriter,
    node: Node,
    x: Value,
    path: list[tuple[Node, Value | None]],
    padding: list[Dim],
) -> Value:
    """x and what a path to one of its parts adds to that."""
    for place, (step, added) in enumerate(path):
        if added is None:
            continue
        emit, shape = rewriter.emit, step.output.shape
        if not same_shape(added.shape, shape):
            kind = [TensorType(x.dtype, shape)]
            attrs = {"size": list(shape)}
            added = emit("aten.expand", [added], attrs, at=node, types=kind)[0]
        for layout, other in path[place + 1 :]:
            if other is None:
                kind = [layout.output.tensor_type]
                added = emit(layout.op, [added], layout.attrs, at=node, types=kind)[0]
        added = emit("aten.pad", [added], {"pad": padding, "value": -0.0}, at=node)[0]
        x = emit("aten.add.Tensor", [x, added], {}, at=node, fused=[step])[0]
    return x


def _path_to_part(
    written: Value, is_part: Callable[[Value], bool]
) -> list[tuple[Node, Value | None]] | None:
    """The layouts, and the sums with what they add, from a part of a tensor down to what is written
    in its place. None where some element is moved, or is no sum with the one before.
    """
    start = fresh_axes(written.shape)
    stack: list[tuple[Operand, list[tuple[Node, Value | None]]]] = [(Operand(written, start), [])]
    while stack:
        operand, path = stack.pop()
        value, node = operand.value, operand.value.producer
        if is_part(value):
            if operand.dims == tuple(map(resolve, start)):
                return path
            continue
        if node is None or len(path) == _LONGEST or value.dtype != written.dtype:
            continue
        if node.op == "aten.add.Tensor" and attribute(node, "alpha") == 1:
            left, right = inputs_of(node, "self", "other")
            for side, other in ((left, right), (right, left)):
                if same_type(side, value) and other.dtype == value.dtype:
                    stack.append((Operand(side, operand.axes), [(node, other), *path]))
        elif len(node.inputs) == 1 and (above := climb(operand)) is not None:
            stack.append((above, [(node, None), *path]))
    return None


def _starts(value: Value, dim: int, first: Dim, found: list[Value]) -> bool:
    """Whether a value is cut out along a dim from `first` on; `found` gains what it is cut from."""
    cut = move_of(value)
    if not isinstance(cut, Cut) or cut.single or cut.dim != dim or cut.step != 1:
        return False
    if not same(counted_start(cut), first):
        return False
    found.append(cut.source)
    return True


def _is_part(value: Value, scatter: Node) -> bool:
    """Whether a value is what a scatter replaces, cut out of the same tensor."""
    node = value.producer
    if node is None or node.op != "aten.slice.Tensor":
        return False
    places = ("dim", "start", "end", "step")
    return all(attribute(node, name) == attribute(scatter, name) for name in places) and _is_same(
        node.source, scatter.source
    )


def _is_same(one: Value, other: Value) -> bool:
    """Whether two values are one, or the same slice of one."""
    first, second = one.producer, other.producer
    if one is other or first is None or second is None:
        return one is other
    is_slice = first.op == second.op == "aten.slice.Tensor" and first.attrs == second.attrs
    return is_slice and _is_same(first.source, second.source)


def _padding(node: Node, start: Dim, written: Value) -> list[Dim] | None:
    """How many elements lie around a part of a node's result, as pad takes them: the last axis
    first."""
    shape = node.output.shape
    dim = attribute(node, "dim") % len(shape)
    first = as_dim(start + shape[dim]) if isinstance(start, int) and start < 0 else start
    after = as_dim(shape[dim] - first - written.shape[dim])
    if not (isinstance(first, int) and isinstance(after, int)) or min(first, after) < 0:
        return None
    return [0, 0] * (len(shape) - 1 - dim) + [first, after]


SCATTER_RULES = [scatters, shifted, added_in_part, added_in_joined_part]
