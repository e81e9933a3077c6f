"""A model that does one thing at sizes up to a number and another beyond, as one graph of both.

`if n > 2048: base = base * grown(n)` parts the sizes that were asked for. Each part is traced on a
sample of its own, and the two are joined as the sides of a branch on values are (joining.py), the
condition being made of the size. It is taken if it computes what the model does on both sides, and
has no product that either side spares: else the range that one trace has is told, as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.export import Dim
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Max, Min

from attngraph.checks.both_sides import returns_alike
from attngraph.checks.check import Check
from attngraph.checks.joining import UnlikeError, join, simplify
from attngraph.checks.traced import is_told_apart, is_traced, required_conditions
from attngraph.errors import CaptureError, IRError, UsageError
from attngraph.export.precision import own_precision
from attngraph.frontend.capture import Captured
from attngraph.frontend.interface.own_classes import shapes_by_attribute
from attngraph.frontend.interface.shapes import (
    Request,
    combine,
    named_dims,
    nested_shapes,
    requested_dims,
)
from attngraph.frontend.model import Model
from attngraph.frontend.rewording.resampled import output_of, resized
from attngraph.frontend.sizes.asked_ranges import NarrowedError, Parting
from attngraph.ir import Builder, Graph
from attngraph.ir.dims import rewritten, symbol, symbols_of
from attngraph.ir.traits import (
    ANY_CONVOLUTION,
    ATTENTION,
    FOURIER,
    LARGEST,
    MATRIX,
    PRODUCT,
    RECURRENCE,
    SOFTMAX,
    SORTED,
)
from attngraph.ir.verifier import verify

Take = Callable[[Model], Captured]

_larger: Callable[..., Any] = Max
_smaller: Callable[..., Any] = Min
_LARGEST = 2048
"""Up to which size the other side is tried: the model runs there, a few times."""
_COSTLY = (
    PRODUCT
    | ANY_CONVOLUTION
    | ATTENTION
    | FOURIER
    | LARGEST
    | MATRIX
    | RECURRENCE
    | SOFTMAX
    | SORTED
)


def at_all_sizes(model: Model, take: Take) -> Captured:
    """What `take` makes of a model, at sizes on both sides of a number by which its code chooses.

    Raises CaptureError where `take` does, unless both sides together have the range that was asked
    for by number.
    """
    refusal: NarrowedError | None = None
    try:
        captured = take(model)
        parting = _parting(model, captured)
    except NarrowedError as error:
        refusal, parting = error, error.parting
    if parting is not None and model.module is not None:
        with suppress(CaptureError, UnlikeError, IRError, UsageError):
            return _joined(model, take, parting)
    if refusal is not None:
        raise refusal
    return captured


def _parting(model: Model, captured: Captured) -> Parting | None:
    """The one place at which sizes part, if the trace isn't right on the other side as well."""
    if captured.branches or captured.asked or captured.refusal is not None:
        return None
    if captured.partings:
        return captured.partings[0] if len(captured.partings) == 1 else None
    starts = [
        each
        for each in captured.suspects
        if each.place and each.start is not None and each.start > 2
    ]
    if len(starts) != 1:
        return None
    check = Check(model, captured, own_precision(captured.graph))
    for suspect in required_conditions(check, captured.graph):
        if suspect.start is not None and suspect.place == starts[0].place:
            (name,) = symbols_of(suspect.condition)
            return Parting(name, suspect.start - 1, True, suspect.place)
    return None


def _joined(model: Model, take: Take, parting: Parting) -> Captured:
    """Raises UnlikeError where the sides can't be one graph, or CaptureError as `take` does."""
    assert model.module is not None
    name, last, _, place = parting
    combined = combine(model.module, model.args, model.kwargs)
    shapes = nested_shapes(combined, model.module, named_dims(model.dynamic_shapes))
    model = replace(model, dynamic_shapes=shapes_by_attribute(combined, shapes))
    requests = requested_dims(combined, model.dynamic_shapes)
    own = [request for request in requests if request.root == name]
    if last >= _LARGEST or not own or any(request.name != name for request in own):
        raise UnlikeError
    above = own[0].size > last
    theirs = take(_on_side(model, own, last, above=not above))
    ours = take(_on_side(model, own, last, above=above))
    if not (_is_plain(ours) and _is_plain(theirs) and returns_alike(ours, theirs)):
        raise UnlikeError
    graph, costs = ours.graph, [_cost(ours.graph), _cost(theirs.graph)]
    low, high = own[0].low or 1, own[0].high
    for each in (graph, theirs.graph):
        each.dims[name] = replace(graph.dims[name], low=low, high=high)
    for each, is_above in ((graph, above), (theirs.graph, not above)):
        end = _larger(symbol(name), last + 1) if is_above else _smaller(symbol(name), last)
        _keep_numbers_within(each, name, end)
    _join_by_size(graph, theirs.graph, name, last, above=above)
    verify(graph)
    captured = replace(
        ours,
        notes=tuple(dict.fromkeys((*ours.notes, *theirs.notes, _note(place)))),
        apart=tuple(dict.fromkeys((*ours.apart, *theirs.apart))),
        suspects=tuple(dict.fromkeys((*ours.suspects, *theirs.suspects))),
        demanded={**theirs.demanded, **ours.demanded},
        opened=ours.opened or theirs.opened,
    )
    if _cost(graph) > min(costs) or not _is_model(model, captured, parting, low, high):
        raise UnlikeError
    return captured


def _is_plain(side: Captured) -> bool:
    """Whether nothing else is chosen in a trace, or is to be checked of it as a whole."""
    chooses = side.branches or side.asked or side.partings or side.hits
    return not chooses and side.refusal is None


def _on_side(model: Model, own: list[Request], last: int, *, above: bool) -> Model:
    """The model at the sizes of one side, with a sample that has one."""
    (name,) = {request.name for request in own}
    size, low, high = own[0].size, own[0].low, own[0].high
    if above:
        low, size = last + 1, size if size > last else last + 1
    else:
        high, size = last, min(size, last)
    ends = {key: end for key, end in (("min", low), ("max", high)) if end is not None}
    if size < 2 or (low is not None and high is not None and low >= high):
        raise UnlikeError
    narrower = Dim(str(name), **ends)

    def on_side(dim: Any) -> Any:
        return narrower if isinstance(dim, Dim) and dim.__name__ == name else dim

    args, kwargs = resized((model.args, dict(model.kwargs)), own, lambda _: size)
    assert model.module is not None
    if output_of(model.module, (args, kwargs)) is None:  # it takes no such sizes
        raise UnlikeError
    shapes = pytree.tree_map(on_side, model.dynamic_shapes)
    return replace(model, args=args, kwargs=kwargs, dynamic_shapes=shapes)


def _join_by_size(graph: Graph, other: Graph, name: str, last: int, *, above: bool) -> None:
    """Has the outputs be those of `other` on the side that the graph isn't of."""
    simplify(graph)
    first = next(iter(graph), None)
    if first is None:
        raise UnlikeError
    build = Builder(graph, first, first.loc)
    size = build("aten.full", size=[], fill_value=symbol(name), dtype=torch.int64)
    is_above = build("aten.gt.Scalar", size, other=last)
    for made in (size.producer, is_above.producer):
        assert made is not None
        made.number = 0  # it is known before anything else is computed
    names, results = graph.output_names, len(graph.outputs)
    graph.set_outputs([*graph.outputs, is_above], [*names, "is_above"])
    join(graph, other, results, when=not above, results=results)
    graph.set_outputs(graph.outputs[:results], names)


def _keep_numbers_within(graph: Graph, name: str, end: Any) -> None:
    """Has numbers that are made of a size be those of the `end` of a side beyond it.

    There they aren't read, and there may be none: a power of (n / 2048 − 1), or what it divides.
    """

    def within(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return type(item)(map(within, item))
        is_size = not isinstance(item, sympy.Expr) or item.is_integer
        return item if is_size else rewritten(item, {name: end})

    for node in graph:
        attrs = {key: within(value) for key, value in node.attrs.items()}
        if attrs != dict(node.attrs):
            types = [value.type for value in node.outputs]
            twin = graph.create(node.op, node.inputs, attrs, types=types, loc=node.loc, before=node)
            graph.replace(node, twin.outputs)


def _cost(graph: Graph) -> int:
    return sum(node.op in _COSTLY or bool(node.regions) for node in graph)


def _is_model(
    model: Model, captured: Captured, parting: Parting, low: int, high: int | None
) -> bool:
    check = Check(model, captured, own_precision(captured.graph))
    sample, *_ = check.samples.sizes()
    for size in _tried(parting.last, low, high):
        tensors = check.samples.at({**sample, parting.name: size})
        if not is_traced(check, captured.graph, tensors):
            return False
        contrasts = check.samples.contrasts(tensors)
        if any(is_told_apart(check, captured.graph, each) for each in contrasts):
            return False
    return True


def _tried(last: int, low: int, high: int | None) -> Iterator[int]:
    """The sizes next to the number, and some further away."""
    for size in (last, last + 1, last + 2, 2 * last + 1, max(low, 2), (low + last) // 2):
        if low <= size and (high is None or size <= high):
            yield size


def _note(place: str) -> str:
    return (
        f"The model chooses by a size{place}. The file computes both sides and takes one, as "
        "torch.where does."
    )
