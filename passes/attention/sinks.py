"""Softmaxes with a sink: one more logit per row whose probability is dropped.

Written as a column that is concatenated before the softmax and cut off after it (gpt-oss,
StreamingLLM), or as one more term in the denominator (softmax-plus-one).
"""

from __future__ import annotations

import torch

from attngraph.analysis.masks.row_policy import Formula
from attngraph.analysis.values.scalars import shift_of, widens
from attngraph.ir import Builder, Node, Value
from attngraph.ir.dims import same
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import attribute, input_of
from attngraph.ir.traits import CLAMP, COPY, MAXIMUM_ALONG
from attngraph.passes.attention.hidden_rows import Settler
from attngraph.passes.rewriting.checked import Checked

_SUM = "aten.sum.dim_IntList"


def _through_copies(value: Value) -> list[Node]:
    """The readers of a value, past copies and casts."""
    readers: list[Node] = []
    for node in value.users:
        if node.op in COPY or widens(node):
            readers += _through_copies(node.output)
        else:
            readers.append(node)
    return readers


def raise_sink_column(build: Builder, checked: Checked, softmax: Node) -> None:
    """softmax(cat(x, s))[…, :-1], or with s first, where nobody reads the column of s."""
    source = softmax.inputs[0]
    if source is None or source.dtype != softmax.output.dtype:
        return
    dim = attribute(softmax, "dim") % len(source.shape)
    joined = source.producer
    if joined is not None and joined.op == "aten.sub.Tensor" and joined.inputs[1] is not None:
        row = joined.inputs[1].producer
        inner = joined.inputs[0]
        if row is None or row.op not in MAXIMUM_ALONG or row.inputs[0] is not inner:
            return
        joined = inner.producer if inner is not None else None
    column = None if joined is None else _column(joined, dim)
    if joined is None or column is None or softmax.output in checked.graph.outputs:
        return
    x, sink, is_first = column
    readers = _through_copies(softmax.output)
    kept = [_kept(node, dim, x.shape[dim], is_first) for node in readers]
    if not kept or any(cut is None for cut in kept):
        return
    build.at(softmax, fuse_locs([joined, softmax], softmax))
    if sink is None:
        zero = torch.full([1] * len(x.shape), _padding(joined), dtype=x.dtype)
        sink = build.constant(zero, "sink")
    elif sink.data is not None:
        sink = build.constant(_narrowed(sink.data.detach()), "sink")
    result = build("attn.sink_softmax", x, sink, dim=dim)
    checked.replace([(cut, build.cast(result, cut.dtype)) for cut in kept if cut is not None])


def _narrowed(data: torch.Tensor) -> torch.Tensor:
    """The data, of size 1 along every axis along which it is constant."""
    for axis, size in enumerate(data.shape):
        first = data.narrow(axis, 0, 1) if size > 1 else data
        if bool((data == first).all()):
            data = first
    return data


def _column(joined: Node, dim: int) -> tuple[Value, Value | None, bool] | None:
    """(x, sink, whether the sink is first) of a cat with one column; no sink where x is padded."""
    rank = len(joined.outputs[0].shape)
    if joined.op == "aten.pad":
        x, widths = joined.inputs[0], list(attribute(joined, "pad"))
        place = 2 * (rank - 1 - dim)
        here = widths[place : place + 2]
        is_plain = attribute(joined, "mode") == "constant" and sum(map(abs, widths)) == 1
        return (x, None, here == [1, 0]) if x is not None and is_plain and sum(here) == 1 else None
    if joined.op != "aten.cat" or attribute(joined, "dim") % rank != dim:
        return None
    parts = input_of(joined, "tensors")
    if len(parts) != 2:
        return None
    first, last = parts
    if last.shape[dim] == 1:
        return first, last, False
    return (last, first, True) if first.shape[dim] == 1 else None


def _padding(node: Node) -> float:
    return float(attribute(node, "value") or 0.0)


def _kept(node: Node, dim: int, size: object, drops_first: bool) -> Value | None:
    """What a reader takes, where that is exactly the other columns."""
    if node.op == "aten.split_with_sizes":
        cut, rest = node.outputs[-1 if drops_first else 0], node.outputs
        others = [value for value in rest if value is not cut]
        is_cut = not any(value.uses for value in others) and len(rest) == 2
    elif node.op == "aten.slice.Tensor":
        cut = node.output
        start = attribute(node, "start") or 0
        is_cut = start == int(drops_first) and attribute(node, "step") == 1
    else:
        return None
    is_cut = is_cut and attribute(node, "dim") % len(cut.shape) == dim
    return cut if is_cut and same(cut.shape[dim], size) else None


def raise_plus_one(settler: Settler, node: Node, shifted_by: str) -> bool:
    """Whether `node` was exp(x) / (1 + Σ exp(x)), or exp(y − m) / (exp(−m) + Σ exp(y − m)).

    The first's exponentials may overflow: `shifted_by` says what becomes of its roundings.
    """
    if node.op != "aten.div.Tensor":
        return False
    numerator, denominator = node.inputs
    total = denominator.producer if denominator is not None else None
    power = numerator.producer if numerator is not None else None
    if total is None or power is None or power.op != "aten.exp" or numerator is None:
        return False
    x, shift, along = power.inputs[0], "", None
    if x is None or not total.inputs:
        return False
    if total.op == "aten.add.Scalar" and shift_of(total) == 1:
        sum_of = total.inputs[0]
    elif total.op == "aten.add.Tensor" and attribute(total, "alpha") == 1:
        shifted = _shift(x, total)
        if shifted is None:
            return False
        x, sum_of, (shift, along) = shifted
    else:
        return False
    what = "" if shift else shifted_by
    if not settler.checked.allows(what):
        return False
    reduced = sum_of.producer if sum_of is not None else None
    if reduced is None or reduced.op != _SUM or reduced.inputs[0] is not numerator:
        return False
    dims = attribute(reduced, "dim")
    if not dims or len(dims) != 1 or not attribute(reduced, "keepdim"):
        return False
    if along is not None and along != dims[0] % len(x.shape):  # not constant along the sum
        return False
    build = settler.build.at(node, fuse_locs([power, node], node))
    formula = Formula(shift, addend=True)
    settled = settler.settle(node, x, (dims[0] % len(x.shape),), formula)
    if settled is None:
        return False
    zero = build.constant(torch.zeros([1] * len(x.shape), dtype=x.dtype), "sink")
    softmax = build("attn.sink_softmax", settled, zero, dim=dims[0])
    return settler.replace(node, softmax, what)


def _shift(x: Value, total: Node) -> tuple[Value, Value | None, tuple[str, int]] | None:
    """(y, Σ, (shift, axis)) where x is y − m and one addend is exp(−m); m is y's maximum along an
    axis, or no less than 0, for no other is known to keep exp(−m) finite."""
    node = x.producer
    if node is None or node.op != "aten.sub.Tensor":
        return None
    y, m = node.inputs
    for index in (0, 1):
        side, other = total.inputs[index], total.inputs[1 - index]
        power = side.producer if side is not None else None
        if power is None or power.op != "aten.exp" or power.inputs[0] is None:
            continue
        negated = power.inputs[0].producer
        if negated is not None and negated.op == "aten.neg" and negated.inputs[0] is m:
            shift = None if y is None or m is None else _kind(y, m)
            return None if y is None or shift is None else (y, other, shift)
    return None


def _kind(y: Value, m: Value) -> tuple[str, int] | None:
    """What a shift is of the logits y: their "maximum" along an axis, or that or 0 ("positive")."""
    row, kind = m.producer, "maximum"
    if row is not None and (row.op in CLAMP or row.op == "aten.relu"):
        is_zero = row.op == "aten.relu" or row.attrs.get("min") == 0
        if not is_zero or row.attrs.get("max") is not None:
            return None
        row, kind = (row.inputs[0].producer if row.inputs[0] else None), "positive"
    if row is None or row.op not in MAXIMUM_ALONG or row.inputs[0] is not y:
        return None
    dims = attribute(row, "dim")
    axes = [dims] if isinstance(dims, int) else list(dims or ())
    if len(axes) != 1 or not attribute(row, "keepdim"):
        return None
    return kind, axes[0] % len(y.shape)
