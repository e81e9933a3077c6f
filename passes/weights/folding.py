"""Linears and convolutions with other weights in the place of those there are.

The frame that the folds share: what each weight becomes is planned by the pass, in float64; here
the products are made anew with the layout ops around them, compared with the old ones before the
new weights are rounded (checked.py), and what nobody reads any more goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from attngraph.analysis.values.matching import without_trailing
from attngraph.analysis.values.weights import (
    Owners,
    derived,
    is_known,
    is_power_of_two,
    weight_bytes,
    wide,
)
from attngraph.ir import Graph, Node, Value
from attngraph.ir.dead import discard, erase_dead
from attngraph.ir.graph import fuse_locs
from attngraph.ir.ops import input_of
from attngraph.passes.rewriting.checked import Checked


@dataclass(frozen=True, slots=True)
class Folded:
    """A product, and its new weight and bias in float64; None stays as it is."""

    product: Node
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    is_exact: bool = False
    drops_bias: bool = False


def scaled_exactly(weight: Value, scaled: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether scaling moved exponents only, and none out of the dtype's range."""
    is_lossless = bool((scaled.to(weight.dtype).double() == scaled).all())
    return is_lossless and is_power_of_two(scale)


def behind_input(
    linears: Iterable[Node],
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    owners: Owners,
) -> list[Folded] | None:
    """Linears of scale ⊙ x + shift as linears of x; None where a weight is not theirs to change.

    W (γ ⊙ x + β) + b is (W · diag γ) x + (W β + b). `scale` and `shift` are (K,), None is 1 or 0.
    """
    folded = []
    for linear in linears:
        source, weight, bias = (input_of(linear, name) for name in ("input", "weight", "bias"))
        if not is_known(weight) or weight.dtype != source.dtype:
            return None
        if scale is not None and not owners.is_sole(weight):
            return None
        if bias is not None and (not is_known(bias) or bias.dtype != weight.dtype):
            return None
        new_weight = None if scale is None else wide(weight) * scale
        new_bias = None
        if shift is not None:
            new_bias = wide(weight) @ shift + (0.0 if bias is None else wide(bias))
        is_exact = shift is None
        if scale is not None and new_weight is not None:
            is_exact = is_exact and scaled_exactly(weight, new_weight, scale)
        folded.append(Folded(linear, new_weight, new_bias, is_exact))
    return folded


def grows(
    folded: Iterable[Folded], owners: Owners, freed: Iterable[Value | None], beside: int = 0
) -> bool:
    """Whether more bytes are stored than before once `freed` is not needed, with some `beside`."""
    stored, old = beside, list(freed)
    for item in folded:
        weight, bias = input_of(item.product, "weight"), input_of(item.product, "bias")
        if item.bias is not None:
            stored += weight_bytes(weight.dtype, weight.shape[:1])
            old.append(bias)
    return stored > owners.freed(old)


def fold(
    checked: Checked,
    folded: Iterable[Folded],
    nodes: Sequence[Node],
    pairs: Sequence[tuple[Value, Value]] = (),
    *,
    renamed: Mapping[Value, Value] | None = None,
    absorbed: Node | None = None,
    constants: Iterable[Value | None] = (),
    leaves: Sequence[Value] | None = None,
    biases: Sequence[Value] = (),
    reassociates: str = "",
) -> list[Node] | None:
    """Makes `nodes` anew, inputs first, the products among them with their new weights.

    They read what `renamed` maps a value to in the place of that value. For each pair the second
    value, or its copy, takes the place of the first; so do the copies of all that others read,
    `absorbed` not counted. `constants` go where nobody else reads them. `leaves`, `biases` and
    `reassociates` are those of `Checked.replace`.

    Returns the new products; None where they were taken back.
    """
    if not checked.allows(reassociates):
        return None
    graph, copies = checked.graph, dict(renamed or {})
    plans = {item.product: item for item in folded}
    unrounded: dict[Value, torch.Tensor] = {}
    made: list[tuple[Node, Node]] = []
    old = list(constants)
    for node in nodes:
        inputs = [None if value is None else copies.get(value, value) for value in node.inputs]
        plan, loc = plans.get(node), node.loc
        if plan is not None:
            old += node.inputs[1:]
            inputs = _weighted(graph, plan, inputs, unrounded)
            loc = loc if absorbed is None else fuse_locs([node, absorbed], node)
        types = [value.type for value in node.outputs]
        copy = graph.create(node.op, inputs, node.attrs, types=types, loc=loc, before=node)
        copies.update(zip(node.outputs, copy.outputs, strict=True))
        made.append((node, copy))
    inside, returned = {*nodes, absorbed}, set(graph.outputs)
    read = [
        value
        for node in nodes
        for value in node.outputs
        if value in returned or not inside.issuperset(value.users)
    ]
    replaced = [(a, copies.get(b, b)) for a, b in (*pairs, *zip(read, read, strict=True))]
    if not checked.replace(
        replaced,
        leaves=leaves,
        biases=biases,
        unrounded=unrounded,
        reassociates=reassociates,
        at=next(iter(plans)),
    ):
        return None
    for first, _ in replaced:
        if first.producer is not None:
            erase_dead(graph, [first.producer])
    for node, copy in made:
        graph.take_place(copy, node)
    discard(graph, old)
    return [copy for node, copy in made if node in plans]


def _weighted(
    graph: Graph,
    plan: Folded,
    inputs: Sequence[Value | None],
    unrounded: dict[Value, torch.Tensor],
) -> list[Value | None]:
    """The inputs of a product with its new weights, which are noted before they are rounded."""
    weight, bias = input_of(plan.product, "weight"), input_of(plan.product, "bias")
    new_weight, new_bias = weight, None if plan.drops_bias else bias
    if plan.weight is not None:
        name = derived(weight, ".scaled")
        new_weight = graph.add_constant(name, plan.weight.to(weight.dtype))
        unrounded[new_weight] = plan.weight
    if plan.bias is not None:
        name = derived(weight if bias is None else bias, ".shifted")
        new_bias = graph.add_constant(name, plan.bias.to(weight.dtype))
        unrounded[new_bias] = plan.bias
    return without_trailing(inputs[0], new_weight, new_bias)
