"""pair-loops: complex numbers that a loop takes, carries or gives are pairs of reals."""

from __future__ import annotations

from attngraph.analysis.values.complex_parts import is_complex
from attngraph.ir import Builder, Graph, Node, Remark, TensorType, Value
from attngraph.ir.clone import copy_nodes
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.ops import attribute
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass


class PairLoops(GraphPass, name="pair-loops", exact=True):
    """What a loop is over has to be real in ONNX; split-complex does the rest, on either side.

    A complex value at the edge of a body becomes its real and its imaginary part, one behind the
    other, of which the body makes the complex number again, or the graph behind the loop.
    """

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name)
        for node in list(graph):
            if node.op == "attn.scan" and any(map(is_complex, (*node.inputs, *node.outputs))):
                _pair(graph, node, checked)
        return checked.remarks


def _pair(graph: Graph, node: Node, checked: Checked) -> None:
    build = Builder(graph, node, node.loc)
    carried, scanned = attribute(node, "carried"), attribute(node, "scanned")
    states, items = node.inputs[:carried], node.inputs[carried : carried + scanned]
    made = build.node(
        node.op,
        *(part for value in node.operands for part in _parts(build, value)),
        body=_paired(attribute(node, "body")),
        carried=sum(map(_count, states)),
        scanned=sum(map(_count, items)),
    )
    left = iter(made.outputs)
    wholes = [_whole(build, [next(left) for _ in range(_count(old))]) for old in node.outputs]
    read = [old.uses or old in graph.outputs for old in node.outputs]
    pairs = zip(node.outputs, wholes, strict=True)
    checked.replace([pair for pair, is_read in zip(pairs, read, strict=True) if is_read], at=node)
    eliminate_dead_code(graph)


def _paired(body: Graph) -> Graph:
    """The step on real and imaginary parts, which it takes and gives."""
    made = Graph(body.name)
    made.dims, made.conditions = dict(body.dims), body.conditions
    build, known, given = Builder(made), dict[Value, Value](), dict[Value, list[Value]]()
    for value in body.inputs:
        given[value] = [made.add_input(name, _real_type(value)) for name in _names(value)]
    for value, parts in given.items():
        known[value] = _whole(build, parts)
    for value in body.constants.values():
        known[value] = made.add_constant(value.name, value.data, value.type)
    copy_nodes(body, made, known)
    outputs = [part for value in body.outputs for part in _parts(build, known[value])]
    made.set_outputs(outputs, [f"result_{at}" for at in range(len(outputs))])
    return made


def _parts(build: Builder, value: Value) -> list[Value]:
    if not is_complex(value):
        return [value]
    return [build("aten.real", value), build("aten.imag", value)]


def _whole(build: Builder, parts: list[Value]) -> Value:
    return build("aten.complex", *parts) if len(parts) > 1 else parts[0]


def _names(value: Value) -> list[str]:
    parts = (".real", ".imag") if is_complex(value) else ("",)
    return [f"{value.name}{part}" for part in parts]


def _real_type(value: Value) -> TensorType:
    dtype = value.dtype.to_real() if is_complex(value) else value.dtype
    return TensorType(dtype, value.shape)


def _count(value: Value | None) -> int:
    return 2 if is_complex(value) else 1
