"""Writes products with other weights: the one place where passes make new weights and store them.

A pass decides what each product is to compute, as an `Affine` map (analysis/values/affine.py).
Here the products are made anew with the layout ops around them, compared with the old ones before
the new weights are rounded (checked.py), and what nobody reads any more goes. Weights that are
stacked or cut need no numbers: they are derived from the stored ones, which may have no data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch

from attngraph.analysis.values.affine import Affine, Numbers, read_linear
from attngraph.analysis.values.matching import without_trailing
from attngraph.analysis.values.weights import Owners, derived, is_known, weight_bytes
from attngraph.ir import Graph, Node, TensorType, Value
from attngraph.ir.dead import discard, erase_dead
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import inputs_of
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.trials import LINEAR


def checked_weights(
    graph: Graph, name: str, stored_in: torch.dtype | None, *, exact_only: bool = False
) -> Checked:
    """For a pass that makes new weights: trials of linear maps, of all that a product reads."""
    return Checked(graph, name, LINEAR, depth=None, exact_only=exact_only, stored_in=stored_in)


Plan: TypeAlias = Mapping[Node, Affine]
"""What each product is to compute of its new input."""


def behind(linears: Iterable[Node], scaling: Affine, owners: Owners) -> Plan | None:
    """Linears of scaling(x) as linears of x; None where a weight is not theirs to change.

    W (γ ⊙ x + β) + b is (W · diag γ) x + (W β + b).
    """
    plan = {}
    for node in linears:
        linear = read_linear(node)
        if linear is None or not linear.is_known:
            return None
        if scaling.factor is not None and not owners.is_sole(linear.weight):
            return None
        plan[node] = linear.map.after(scaling)
    return plan


def before(product: Node, scaling: Affine, owners: Owners) -> Plan | None:
    """A product whose result is scaled, as one; None where its weights are not its own to change.

    γ ⊙ (W x + b) + β is (diag γ · W) x + (γ ⊙ b + β).
    """
    linear = read_linear(product, or_convolution=True)
    if linear is None or not (linear.bias is None or is_known(linear.bias)):
        return None
    if scaling.factor is not None and not (linear.is_known and owners.is_sole(linear.weight)):
        return None
    return {product: scaling.after(linear.map)}


def is_exact(plan: Plan) -> bool:
    """Whether no rounding of the model changes."""
    return all(item.is_exact for item in plan.values())


def grows(plan: Plan, owners: Owners, freed: Iterable[Value | None], beside: int = 0) -> bool:
    """Whether more bytes are stored than before once `freed` is not needed, with some `beside`."""
    stored, old = beside, list(freed)
    for product, item in plan.items():
        weight, bias = inputs_of(product, "weight", "bias")
        if isinstance(item.shift, torch.Tensor):
            stored += weight_bytes(weight.dtype, weight.shape[:1])
            old.append(bias)
    return stored > owners.freed(old)


def fold(
    checked: Checked,
    plan: Plan,
    nodes: Sequence[Node],
    instead: Mapping[Value, Value] | None = None,
    *,
    constants: Iterable[Value | None] = (),
    leaves: Sequence[Value] | None = None,
    biases: Sequence[Value] = (),
    reassociates: str = "",
) -> list[Node] | None:
    """Makes `nodes` anew, inputs first, the products among them with their new weights.

    `instead` says for each result of a node that the weights absorb what takes its place: a value,
    or its copy where one of `nodes` computes it. What others read of `nodes` is replaced by the
    copies. `constants` go where nobody else reads them. `leaves`, `biases` and `reassociates` are
    those of `Checked.replace`.

    Returns the new products; None where they were taken back.
    """
    if not checked.allows(reassociates):
        return None
    graph, copies = checked.graph, dict(instead or {})
    absorbed = next((value.producer for value in copies), None)
    unrounded: dict[Value, torch.Tensor] = {}
    made: list[tuple[Node, Node]] = []
    old = list(constants)
    for node in nodes:
        inputs = [None if value is None else copies.get(value, value) for value in node.inputs]
        loc = node.loc
        if node in plan:
            old += node.inputs[1:]
            inputs = without_trailing(inputs[0], *_weights(graph, node, plan[node], unrounded))
            loc = loc if absorbed is None else fuse_locs([node, absorbed], node)
        copy = graph.twin(node, inputs, loc=loc)
        copies.update(zip(node.outputs, copy.outputs, strict=True))
        made.append((node, copy))
    inside, returned = {*nodes, absorbed}, set(graph.outputs)
    read = [
        value
        for node in nodes
        for value in node.outputs
        if value in returned or not inside.issuperset(value.users)
    ]
    outside = [
        value
        for value in instead or ()
        if value in returned or not set(nodes).issuperset(value.users)
    ]
    replaced = [(value, copies.get(copies[value], copies[value])) for value in (*outside, *read)]
    if not checked.replace(
        replaced,
        leaves=leaves,
        biases=biases,
        unrounded=unrounded,
        reassociates=reassociates,
        at=next(iter(plan)),
    ):
        return None
    # a node that nothing read was replaced nowhere, and goes too
    replaced_nodes = [absorbed, *(first.producer for first, _ in replaced)]
    erase_dead(graph, [*replaced_nodes, *(node for node, _ in made)])
    for node, copy in made:
        graph.take_place(copy, node)
    discard(graph, old)
    return [copy for node, copy in made if node in plan]


def _weights(
    graph: Graph, product: Node, item: Affine, unrounded: dict[Value, torch.Tensor]
) -> list[Value | None]:
    """The weight and bias of a product; new ones are noted before they are rounded."""
    weight, bias = inputs_of(product, "weight", "bias")
    shifted = derived(weight if bias is None else bias, ".shifted")
    return [
        store(graph, derived(weight, ".scaled"), item.factor, weight.dtype, unrounded),
        store(graph, shifted, item.shift, weight.dtype, unrounded),
    ]


def store(
    graph: Graph,
    name: str,
    data: Numbers | None,
    dtype: torch.dtype,
    unrounded: dict[Value, torch.Tensor],
) -> Value | None:
    """A constant of these numbers, noted before they are rounded. What is one stays the same."""
    if not isinstance(data, torch.Tensor):
        return data
    value = graph.add_constant(name, data.to(dtype))
    unrounded[value] = data
    return value


def stacked(checked: Checked, parts: Sequence[Value | None], rows: Sequence[int]) -> Value | None:
    """One constant of the rows of all parts, zeros for absent ones; None where all are absent."""
    given = [part for part in parts if part is not None]
    if not given:
        return None

    def joined(data: Sequence[torch.Tensor]) -> torch.Tensor:
        there = iter(data)
        return torch.cat(
            [
                data[0].new_zeros(size, *data[0].shape[1:]) if part is None else next(there)
                for part, size in zip(parts, rows, strict=True)
            ]
        )

    kind = TensorType(given[0].dtype, (sum(rows), *given[0].shape[1:]))
    return checked.derive(_joined([part.name for part in given]), kind, given, joined)


def cut(checked: Checked, whole: Value, rows: Sequence[int]) -> list[Value]:
    """A constant for each run of rows: a view, so that nothing is stored twice."""
    parts = []
    for index, (start, end) in enumerate(pairwise(accumulate(rows, initial=0))):
        kind = TensorType(whole.dtype, (end - start, *whole.shape[1:]))
        part = partial(_rows, start=start, end=end)
        parts.append(checked.derive(f"{whole.name}.{index}", kind, [whole], part))
    return parts


def _rows(data: Sequence[torch.Tensor], *, start: int, end: int) -> torch.Tensor:
    return data[0][start:end]


def _joined(names: Iterable[str]) -> str:
    """`attn.q.weight`, `attn.k.weight` → `attn.q-k.weight`."""
    parts = [name.split(".") for name in dict.fromkeys(names)]
    if len(parts) == 1:
        return ".".join(parts[0])
    shortest = min(map(len, parts))
    head = next((i for i in range(shortest) if len({p[i] for p in parts}) > 1), shortest)
    room = shortest - head
    tail = next((i for i in range(room) if len({p[-1 - i] for p in parts}) > 1), room)
    middle = "-".join(".".join(p[head : len(p) - tail]) for p in parts)
    return ".".join([*parts[0][:head], middle, *parts[0][len(parts[0]) - tail :]])
