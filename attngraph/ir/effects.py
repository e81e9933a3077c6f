"""What a node does besides computing its outputs from its inputs."""

from __future__ import annotations

from attngraph.ir import Graph, Node, ScalarType, Value
from attngraph.ir.dims import symbols_of
from attngraph.ir.ops import attribute, op_def
from attngraph.ir.traits import MUTATING, RANDOM, UNSET

_OFF_SWITCHES = {"train": False, "training": False, "dropout_p": 0.0, "p": 0.0}


def is_random(node: Node) -> bool:
    """Whether two runs may differ. Dropout that is switched off, as an argument says, is not."""
    if node.op not in RANDOM:
        return False
    return not any(
        arg.name in _OFF_SWITCHES and attribute(node, arg.name) == _OFF_SWITCHES[arg.name]
        for arg in op_def(node.op).args
    )


def is_function(node: Node) -> bool:
    """Whether equal inputs and attributes always give equal outputs, and nothing else happens."""
    return not (node.op in MUTATING | UNSET or is_random(node))


def dims_of(value: Value) -> frozenset[str]:
    """The named dims that a value's type mentions."""
    if isinstance(value.type, ScalarType):
        return frozenset([value.type.name] if value.type.name else [])
    return symbols_of(value.type.shape)


def dim_definers(graph: Graph) -> dict[Node, frozenset[str]]:
    """The nodes whose outputs bring in dims that only a run can tell, and those dims."""
    known = frozenset().union(*map(dims_of, graph.inputs))
    definers: dict[Node, frozenset[str]] = {}
    for node in graph:
        new = frozenset().union(*map(dims_of, node.outputs)) - known
        if new:
            definers[node] = new
            known |= new
    return definers
