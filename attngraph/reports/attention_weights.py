"""The weights of a model's attentions, as extra outputs of the optimised model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attngraph.errors import ParityError, UsageError
from attngraph.export.files.save import to_session
from attngraph.export.lowering.lower import lower
from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import ReferenceOutputs, in_float64
from attngraph.export.target import Target
from attngraph.ir import Graph, Loc, Node, Value, clone, interpret
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.ir.traits import CAST, EXPAND, MATMUL, PERMUTE, RESHAPE, SOFTMAX

_SDPA = "aten.scaled_dot_product_attention"

Place = tuple[str, int, str]


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of one attention. `weights` (B, H, S, T): each row sums to 1, or to less where it
    has a sink, or to 0 where it may see nothing. `checked` says that eager PyTorch's are equal.

    `layer` counts the attentions of the optimised model, `heads` are those kept, by their number.
    """

    layer: int
    module: str
    location: str
    heads: tuple[int, ...]
    weights: torch.Tensor
    checked: bool

    def __str__(self) -> str:
        return f"{self.layer}: {self.module or 'the model'} ({self.location})"


def attention_weights(
    graph: Graph,
    origin: Graph | None,
    target: Target,
    tensors: Sequence[torch.Tensor],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    session: Mapping[str, Any] | None = None,
) -> list[AttentionWeights]:
    """Runs the optimised graph with its attentions' weights as outputs.

    `origin` is the graph as it was captured, which tells what eager PyTorch's weights are;
    `session` are keyword arguments of `Session.open`. Raises UsageError for a layer or head that
    isn't there, ParityError where a weight is out of its error budget.
    """
    if any(node.op == "attn.packed_attention" for node in graph):
        raise UsageError(
            "Attentions over rows without padding have no weights (B, H, S, T) to show: optimize "
            "the model without ignore_padded_rows to see them."
        )
    exposed = clone(graph)
    found = list(_expose(exposed))
    if not found:
        told = ["The model has no attention whose weights could be shown.", *hidden_in_loops(graph)]
        raise UsageError(" ".join(told))
    chosen = _choose(found, layers)
    exposed.set_outputs([found[layer][1] for layer in chosen], [f"weights_{at}" for at in chosen])
    results = to_session(lower(exposed, target=target), target, **session or {}).run(tensors)
    eager = _eager(origin, tensors) if origin is not None else {}
    views = []
    for layer, result in zip(chosen, results, strict=True):
        node, _ = found[layer]
        weights = _four_axes(result, node)
        checked = _check(weights, _match(node, eager, weights.shape), layer)
        kept = _heads(heads, weights.shape[1], layer)
        place = node.loc.place or "unknown place"
        picked = weights[:, list(kept)]
        views.append(AttentionWeights(layer, node.loc.module, place, kept, picked, checked))
    return views


def _expose(graph: Graph) -> Iterator[tuple[Node, Value]]:
    """Each attention of the graph with the value of its weights."""
    for node in list(_attentions(graph)):
        if node.op == "attn.attention":
            query, key = inputs_of(node, "query", "key")
            past = input_of(node, "past_key")
            keys = key.shape[1] if past is None else past.shape[2] + key.shape[1]
            shape = (query.shape[0], attribute(node, "heads"), query.shape[1], keys)
            yield _with_weights(graph, node, shape)
        else:
            yield node, node.output


def hidden_in_loops(graph: Graph) -> list[str]:
    """A sentence about each loop over time whose steps hold attentions: those are not shown."""
    told = []
    for node in graph:
        count = sum(1 for region in node.regions for _ in _attentions(region.walk()))
        if count:
            told.append(
                f"The loop over time at {node.loc.place or 'an unknown place'} holds "
                f"{'an attention' if count == 1 else f'{count} attentions'} in each step; what "
                "steps of a loop look at is not shown."
            )
    return told


def _attentions(nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes whose weights can be shown."""
    for node in nodes:
        is_softmax = node.op in SOFTMAX and 2 <= len(node.output.shape) <= 4 and _over_rows(node)
        if node.op == "attn.attention" or is_softmax:
            yield node


def _over_rows(node: Node) -> bool:
    """Whether a softmax that was not fused has rows that differ: one over classes has none."""
    return any(user.op in MATMUL for user in _readers(node))


def _readers(node: Node) -> Iterator[Node]:
    """The nodes that read a value, through layout and casts."""
    for user in node.output.users:
        yield user
        if user.op in RESHAPE | PERMUTE | EXPAND | CAST:
            yield from _readers(user)


def _with_weights(graph: Graph, node: Node, shape: tuple[Any, ...]) -> tuple[Node, Value]:
    if attribute(node, "weights"):
        return node, node.outputs[1]
    context, *presents = node.outputs
    weights_type = type(context.tensor_type)(context.dtype, shape)
    types = [context.type, weights_type, *(value.type for value in presents)]
    attrs = {**node.attrs, "weights": True}
    made = graph.create(node.op, node.inputs, attrs, types=types, loc=node.loc, before=node)
    context, weights, *presents = made.outputs
    graph.replace(node, [context, *presents])
    return made, weights


def _choose(found: Sequence[tuple[Node, Value]], layers: Sequence[int] | None) -> list[int]:
    listed = ", ".join(
        f"{at} ({node.loc.module or node.loc.place or 'unknown place'})"
        for at, (node, _) in enumerate(found)
    )
    for layer in layers or ():
        if not 0 <= layer < len(found):
            raise UsageError(f"There is no attention {layer}; there are {listed}.")
    return list(range(len(found))) if layers is None else list(layers)


def _heads(wanted: Sequence[int] | None, count: int, layer: int) -> tuple[int, ...]:
    for head in wanted or ():
        if not 0 <= head < count:
            raise UsageError(f"Attention {layer} has no head {head}; it has 0 to {count - 1}.")
    return tuple(range(count)) if wanted is None else tuple(wanted)


def _four_axes(weights: torch.Tensor, node: Node) -> torch.Tensor:
    """(B, H, S, T) of what a softmax gave, whose last axis need not be the keys'."""
    if node.op in SOFTMAX:
        weights = weights.movedim(attribute(node, "dim"), -1)
    if weights.dim() == 2:
        return weights[:, None, None]
    return weights[:, None] if weights.dim() == 3 else weights


_Runs = dict[Place, list[tuple[torch.Tensor, torch.Tensor]]]
"""Weights in eager's dtype and in float64, by the place of their softmax, in order."""


def _eager(origin: Graph, tensors: Sequence[torch.Tensor]) -> _Runs:
    plain = _anchors(origin, tensors)
    with in_float64() as double:
        constants = {
            name: double(value.data)
            for name, value in origin.constants.items()
            if value.data is not None
        }
        exact = _anchors(origin, [double(tensor) for tensor in tensors], constants)
    runs: _Runs = {}
    for (node, eager), (_, wide) in zip(plain, exact, strict=True):
        runs.setdefault(_place(node.loc), []).append((eager, wide))
    return runs


def _anchors(
    graph: Graph, tensors: Sequence[torch.Tensor], constants: Any = None
) -> list[tuple[Node, torch.Tensor]]:
    """Each softmax over its last axis, and each SDPA, with its weights."""
    anchors = {node.output: node for node in graph if node.op in SOFTMAX or node.op == _SDPA}
    operands = {v for node in anchors.values() if node.op == _SDPA for v in node.inputs}
    memory: dict[Value | None, Any] = dict(zip(graph.inputs, tensors, strict=True))
    for name, value in graph.constants.items():
        memory[value] = (constants or {}).get(name, value.data)
    found: list[tuple[Node, torch.Tensor]] = []

    def observe(value: Value, result: Any) -> None:
        if value in operands:
            memory[value] = result
        if value in anchors:
            node = anchors[value]
            found.append((node, _sdpa(node, memory) if node.op == _SDPA else result))

    interpret(graph, tensors, observe=observe, constants=constants)
    return [(node, _four_axes(weights, node)) for node, weights in found]


def _sdpa(node: Node, memory: dict[Value | None, Any]) -> torch.Tensor:
    """The probabilities inside `scaled_dot_product_attention`, as torch documents them."""
    query, key = (memory[input_of(node, name)] for name in ("query", "key"))
    mask = memory.get(input_of(node, "attn_mask"))
    scale = attribute(node, "scale")
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3) if key.dim() > 2 else key
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else float(scale))
    if attribute(node, "is_causal"):
        lower = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        logits = logits.masked_fill(~lower, -torch.inf)
    if mask is not None:
        boolean = mask.dtype == torch.bool
        logits = logits.masked_fill(~mask, -torch.inf) if boolean else logits + mask
    probabilities: torch.Tensor = logits.softmax(-1).nan_to_num(0.0)
    return probabilities


def _place(loc: Loc) -> Place:
    return loc.file, loc.line, loc.module


def _places(loc: Loc) -> list[Place]:
    return [_place(loc), *(place for part in loc.fused for place in _places(part))]


def _match(node: Node, eager: _Runs, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Eager's weights of an attention; those of heads written one by one, side by side."""
    for place in dict.fromkeys(_places(node.loc)):
        runs = eager.get(place, [])
        for count in range(1, len(runs) + 1):
            pairs = [torch.cat(parts, 1) for parts in zip(*runs[:count], strict=True)]
            if pairs[0].shape == shape:
                del runs[:count]
                return pairs[0], pairs[1]
    return None


def _check(
    weights: torch.Tensor, eager: tuple[torch.Tensor, torch.Tensor] | None, layer: int
) -> bool:
    if eager is None:
        return False
    reference = ReferenceOutputs((f"weights of attention {layer}",), (eager[0],), (eager[1],))
    parity = compare(reference, [weights], "fp32")
    if not parity.passed:
        raise ParityError(f"The weights of attention {layer} are not eager's: {parity}.")
    return True
