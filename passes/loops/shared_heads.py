"""What all heads of a step share, as Mamba-2's keys and queries are, becomes one for each head."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attngraph.analysis.layout.contraction import einsum_terms
from attngraph.ir import Builder, Dim, Graph, Node, Value
from attngraph.ir.dims import same, same_shape
from attngraph.ir.ops import input_of
from attngraph.ir.slices import forward_slice
from attngraph.ir.traits import MULTIPLICATIVE


def spread_heads(body: Graph, states: Collection[Value]) -> bool:
    """Copies what products of a step spread over the heads of a state (B, H, X, Y), as the products
    would: a factor (B, 1, …), or one of an einsum without heads. False where there is none.

    Copies have a number for each head, as the operands of linear attention do.
    """
    reached = forward_slice(states, body)
    shapes = {state.shape for state in states if len(state.shape) == 4 and state.shape[1] != 1}
    found = [_spread(body, node, shape, reached) for node in list(body) for shape in shapes]
    return any(found)


def _spread(body: Graph, node: Node, state: Sequence[Dim], reached: Collection[Value]) -> bool:
    if len(node.outputs) != 1 or node.graph is not body:
        return False
    rank, lead = len(state), state[:2]
    build = Builder(body, node, node.loc)
    if node.op == "aten.einsum":
        return _spread_terms(body, build, node, state, reached)
    if "mul.Tensor" not in node.op or node.op not in MULTIPLICATIVE:
        return False
    if len(node.output.shape) != rank or not same_shape(node.output.shape[:2], lead):
        return False
    inputs = [
        build("aten.expand", each, size=[*lead, *each.shape[2:]])
        if each is not None
        and each not in reached
        and len(each.shape) == rank
        and same(each.shape[0], lead[0])
        and each.shape[1] == 1
        else each
        for each in node.inputs
    ]
    if inputs == list(node.inputs):
        return False
    body.set_inputs(node, inputs)
    return True


def _spread_terms(
    body: Graph, build: Builder, node: Node, state: Sequence[Dim], reached: Collection[Value]
) -> bool:
    rank, lead = len(state), state[:2]
    operands = list(input_of(node, "tensors"))
    terms, output = einsum_terms(node)
    heads = {
        term[:2]
        for term, value in zip(terms, operands, strict=True)
        if len(term) == rank and same_shape(value.shape[:2], lead)
    }
    if len(output) == rank and same_shape(node.output.shape[:2], lead):
        heads.add(output[:2])
    if len(heads) != 1:
        return False
    (letters,) = heads
    row, head = letters[0], letters[1]
    spread = False
    for at, (term, value) in enumerate(zip(terms, operands, strict=True)):
        if value in reached or term[:1] != row or head in term or len({*term}) != len(term):
            continue
        size = [*lead, *value.shape[1:]]
        made = build("aten.reshape", value, shape=[value.shape[0], 1, *value.shape[1:]])
        operands[at], terms[at] = build("aten.expand", made, size=size), row + head + term[1:]
        spread = True
    if spread:
        equation = f"{','.join(terms)}->{output}"
        body.replace(node, [build("aten.einsum", *operands, equation=equation)])
    return spread
