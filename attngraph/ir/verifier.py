"""Checks a graph: structure first, then every type against a fresh inference."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from attngraph.errors import IRError
from attngraph.ir.dims import CHOOSING, Dim, functions_of, same, same_shape, substitute, symbols_of
from attngraph.ir.graph import Graph, Node, Value
from attngraph.ir.infer import TypeInference
from attngraph.ir.ops import op_def
from attngraph.ir.printer import excerpt
from attngraph.ir.ranges import Ranges
from attngraph.ir.settling import bounded, settled
from attngraph.ir.types import TensorType


def verify(graph: Graph, *, types_of: Iterable[Node] | None = None) -> None:
    """Raises IRError at the first violation, showing the node and a few lines around it.

    Regions are graphs and verify as such. `types_of` limits the re-inference (default: every node);
    the graph's own structure is always checked whole.
    """
    _structure(graph)
    inference = TypeInference(dict(graph.dims), graph.conditions)
    for node in graph if types_of is None else types_of:
        if node.graph is graph:
            for region in node.regions:
                verify(region)
            _types(graph, node, inference)


def _fail(graph: Graph, node: Node, sentence: str) -> None:
    raise IRError(f"{sentence} At {node.loc}:\n{excerpt(graph, node)}")


def _structure(graph: Graph) -> None:
    defined: set[Value] = {*graph.inputs, *graph.constants.values()}
    names: dict[str, Value] = {}
    for given in (*graph.inputs, *graph.constants.values()):
        if names.setdefault(given.name, given) is not given:
            raise IRError(f"%{given.name} is defined twice.")
        if given.data is not None:
            held = TensorType(given.data.dtype, tuple(given.data.shape))
            if held != given.type:
                raise IRError(f"%{given.name} is declared {given.type} but holds {held}.")
    known = {name for value in graph.inputs for name in value.type.symbols}
    for node in graph:
        for position, value in enumerate(node.inputs):
            if value is None:
                continue
            if value not in defined:
                _fail(graph, node, f"%{value.name} is read before it is defined.")
            if (node, position) not in value._uses:
                _fail(graph, node, f"%{value.name} doesn't know this use.")
        for value in node.outputs:
            if names.setdefault(value.name, value) is not value:
                _fail(graph, node, f"%{value.name} is defined twice.")
            if value.producer is not node:
                _fail(graph, node, f"%{value.name} names another producer.")
            defined.add(value)
        missing = symbols_of(list(node.attrs.values())) - known
        if missing:
            _fail(graph, node, f"Dim {', '.join(sorted(missing))} is used before it is known.")
        for value in node.outputs:
            known |= value.type.symbols
    for value in defined:
        for node, position in value.uses:
            if node.graph is not graph or node.inputs[position] is not value:
                raise IRError(f"%{value.name} lists a use that isn't there: {node!r}.")
    for value in graph.outputs:
        if value not in defined:
            raise IRError(f"The graph returns %{value.name}, which it doesn't define.")


def _types(graph: Graph, node: Node, inference: TypeInference) -> None:
    if any(_unbacked(value, graph) for value in node.outputs):
        return  # a size that only a run can tell: a second inference would invent a new name
    inferred = inference.infer(op_def(node.op), node.inputs, node.attrs)
    if any(type.symbols - graph.dims.keys() for type in inferred if isinstance(type, TensorType)):
        return  # such a size again, which the model's own check said to be a number
    if len(inferred) != len(node.outputs):
        _fail(graph, node, f"{node.op} has {len(inferred)} outputs, not {len(node.outputs)}.")
    for value, type in zip(node.outputs, inferred, strict=True):
        if isinstance(type, TensorType) and isinstance(value.type, TensorType):
            declared = settled(value.type.shape, bounded(graph.dims, graph.conditions))
            is_same = same_shape(type.shape, declared) or _agree(type.shape, declared, graph)
            if type.dtype != value.type.dtype or not is_same:
                _fail(graph, node, f"%{value.name} is declared {value.type} but is {type}.")
        elif type != value.type:
            _fail(graph, node, f"%{value.name} is declared {value.type} but is {type}.")


_SIZES = 24
"""How many values of each dim expressions are compared at."""


def _agree(shape: Sequence[Dim], other: Sequence[Dim], graph: Graph) -> bool:
    """Whether shapes are equal but for how a min or max is written, at small sizes of each dim."""
    if len(shape) != len(other):
        return False
    limits = Ranges.of(graph)
    for pair in zip(shape, other, strict=True):
        if same(*pair):
            continue
        names = symbols_of(pair)
        if not functions_of(pair) & CHOOSING or not names <= graph.dims.keys():
            return False
        least = {name: max(graph.dims[name].low, 1) for name in names}
        for name, more in itertools.product(names, range(_SIZES)):
            sizes = {**least, name: least[name] + more}
            if not limits.broken(sizes) and len(set(substitute(pair, sizes))) > 1:
                return False
    return True


def _unbacked(value: Value, graph: Graph) -> bool:
    known = frozenset().union(*[v.type.symbols for v in graph.inputs])
    return bool(value.type.symbols - known)
