"""settle-rows: row-wise regions run in the order of axes that needs the fewest permutes.

An encoder whose sequence comes first is permuted before and after every attention. Everything
between two attentions (norms, projections, residual sums) computes each row by itself, so it can
just as well run with the batch first: one permute remains at each end of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attngraph.analysis.rows.batching import resized, tracks
from attngraph.analysis.rows.row_wise import linked
from attngraph.ir import Dim, Graph, Node, Remark, TensorType, Value
from attngraph.ir.dims import same_shape
from attngraph.ir.ops import attribute
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.trials import LAYOUT

Order = tuple[int, ...]


class SettleRows(GraphPass, name="settle-rows", exact=True):
    """Reorders the rows of whole regions of row-wise ops where that removes permutes."""

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, kinds=LAYOUT)
        for region in _regions(graph):
            order = _best_order(graph, region)
            if order is not None:
                _reorder(graph, checked, region, order)
        return checked.remarks


def _regions(graph: Graph) -> list[list[Node]]:
    """Row-wise nodes that hand rows of one shape to each other, each region in graph order."""
    operands = {node: found for node in graph if (found := _row_operands(node))}
    place = {node: at for at, node in enumerate(operands)}
    groups = (
        [node, *(value.producer for value in found if value.producer in operands)]
        for node, found in operands.items()
    )
    return [sorted(region, key=place.__getitem__) for region in linked(groups)]


def _rows(node: Node) -> tuple[Dim, ...]:
    return tuple(node.outputs[0].shape[:-1])


def _has_rows(value: Value, node: Node) -> bool:
    """Whether a value has the rows of the node's result: it is permuted with them."""
    if not isinstance(value.type, TensorType):
        return False
    return same_shape(value.shape[:-1], _rows(node))


def _lacks_rows(value: Value, node: Node) -> bool:
    """Whether every row of the result reads the same elements of a value."""
    if not isinstance(value.type, TensorType):
        return True
    return all(dim == 1 for dim in value.shape[:-1]) and len(value.shape) <= len(_rows(node)) + 1


def _row_operands(node: Node) -> list[Value]:
    """The operands with the rows of the results; none where the node isn't row-wise.

    Each row of the results is then made from the same row of these, and from all of the others.
    """
    found = tracks(node)
    if found is None:
        return []
    rank, operands = len(node.outputs[0].shape), list[Value]()
    if rank < 3 or any(len(value.shape) != rank for value in node.outputs):
        return []
    rows = tuple(range(rank - 1))
    for value, track in zip(node.inputs, found, strict=True):
        if value is None or set(rows).isdisjoint(track) or _lacks_rows(value, node):
            continue
        if track[:-1] != rows or not _has_rows(value, node):
            return []
        operands.append(value)
    return operands


@dataclass(frozen=True, slots=True)
class _Border:
    """Values with a region's rows that enter it, and its own values that are read outside."""

    entering: list[Value]
    leaving: list[Value]


def _border(graph: Graph, region: Sequence[Node]) -> _Border:
    inside = set(region)
    entering: dict[Value, None] = {}
    for node in region:
        for value in _row_operands(node):
            if value.producer not in inside:
                entering[value] = None
    leaving = [
        value
        for node in region
        for value in node.outputs
        if value in graph.outputs or any(user not in inside for user in value.users)
    ]
    return _Border(list(entering), leaving)


def _order(node: Node | None) -> Order | None:
    """The order in which a permute reads its axes, if it leaves the last where it is."""
    if node is None or node.op != "aten.permute":
        return None
    rank = len(node.output.shape)
    order = tuple(dim % rank for dim in attribute(node, "dims"))
    return order if order[-1] == rank - 1 else None


def _inverse(order: Iterable[int]) -> Order:
    order = list(order)
    return tuple(order.index(dim) for dim in range(len(order)))


def _best_order(graph: Graph, region: Sequence[Node]) -> Order | None:
    """The order of axes that needs the fewest permutes; None if it is the one the region has."""
    border = _border(graph, region)
    inside = set(region)
    savings: Counter[Order] = Counter()
    spent = 0  # by any order but the region's own and those that are saved
    for value in border.entering:
        order = _order(value.producer)
        if order is not None and _only_inside(graph, value, inside):
            savings[_inverse(order)] += 1
        elif value.data is None and order is None:
            spent += 1
    for value in border.leaving:
        readers = [user for user in value.users if user not in inside]
        orders = [_order(reader) for reader in readers]
        savings.update(order for order in orders if order is not None)
        spent += None in orders or value in graph.outputs
    if not savings:
        return None
    order, saved = max(savings.items(), key=lambda item: item[1])
    return order if saved > spent else None


def _only_inside(graph: Graph, value: Value, inside: set[Node]) -> bool:
    return value not in graph.outputs and all(user in inside for user in value.users)


def _reorder(graph: Graph, checked: Checked, region: Sequence[Node], order: Order) -> None:
    border = _border(graph, region)
    moved: dict[Value, Value] = {}
    for node in region:
        inputs = list(node.inputs)
        permuted = set(_row_operands(node))
        for position, value in enumerate(inputs):
            if value is not None and value in permuted:
                if value not in moved:
                    moved[value] = _permute(graph, value, order, node)
                inputs[position] = moved[value]
        types = [_permuted_type(value, order) for value in node.outputs]
        op, attrs = resized(node, [_rows(node)[axis] for axis in order[:-1]])
        again = graph.create(op, inputs, attrs, types=types, loc=node.loc, before=node)
        moved |= dict(zip(node.outputs, again.outputs, strict=True))
    back = _inverse(order)
    pairs = []
    for value in border.leaving:
        assert value.producer is not None
        pairs.append((value, _permute(graph, moved[value], back, value.producer)))
    if checked.replace(pairs):
        for node in reversed(region):
            graph.erase(node)


def _permute(graph: Graph, value: Value, order: Order, before: Node) -> Value:
    kind = _permuted_type(value, order)
    attrs = {"dims": list(order)}
    node = graph.create("aten.permute", [value], attrs, types=[kind], loc=before.loc, before=before)
    return node.output


def _permuted_type(value: Value, order: Order) -> TensorType:
    return TensorType(value.dtype, tuple(value.shape[dim] for dim in order))
