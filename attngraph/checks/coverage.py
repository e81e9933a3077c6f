"""What a parity check has exercised: parameters, masks, attentions and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attngraph.analysis.masks.masking import masking_of, scores_shape
from attngraph.checks.fast_path import fast_path_notes
from attngraph.checks.influence import Influence, influence
from attngraph.checks.roles import Role, roles_of
from attngraph.errors import counted
from attngraph.frontend.capture import Captured
from attngraph.ir import Graph, TensorType, Value, clone, interpret
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.dims import substitute, symbols_of
from attngraph.ir.ops import input_of
from attngraph.ir.slices import backward_slice
from attngraph.ir.storage import identity_of, wraps
from attngraph.mapped import are_large
from attngraph.passes import run
from attngraph.reports.coverage import Coverage

_SHOWN = 3
_MOST_MASKS = 64
_HIDING = -1e4
"""A bias from here on down hides a key."""
_ATTENTION = "attn.attention"


@dataclass(frozen=True)
class Drawings:
    """Labels of the sets of inputs that the check drew: cases, and those the model fails on."""

    cases: Sequence[str]
    rejected: Sequence[str]


def coverage_of(
    module: torch.nn.Module,
    captured: Captured,
    pristine: Graph,
    cases: Mapping[str, tuple[torch.Tensor, ...]],
    eager: Mapping[str, Sequence[torch.Tensor]],
    drawn: Drawings,
    graph: Graph | None,
) -> Coverage:
    """What the cases, of which `eager` are the model's outputs, exercised of the module, of its
    graph as captured, and of the attentions of the optimised `graph`.
    """
    count = len(drawn.cases) + len(drawn.rejected)
    found = Coverage(rejected=len(drawn.rejected), drawn=count)
    if drawn.rejected:
        found.notes.append(
            f"The model itself fails on {len(drawn.rejected)} of {count} sets of inputs that the "
            f"check made, such as {drawn.rejected[0]}."
        )
    everything = dict(module.named_parameters())
    parameters = {name: each for name, each in everything.items() if not wraps(each)}
    if wrapped := [name for name in everything if name not in parameters]:
        found.notes.append(
            f"Not measured whether {len(wrapped)} parameters that wrap other tensors are "
            f"exercised, such as {wrapped[0]}."
        )
    live = clone(pristine)
    eliminate_dead_code(live)  # what no output is computed from is not in the file
    read = {_storage(v.data) for v in live.constants.values() if v.data is not None}
    distinct = {(identity_of(each), each.shape): name for name, each in parameters.items()}
    names = [name for name in distinct.values() if _storage(parameters[name]) in read]
    is_large = are_large(parameters.values())
    if is_large:
        unmeasured = Influence(unknown=names, reason="they are too large for a second copy")
        of_parameters(found, names, unmeasured)
    elif names:
        labels = [*list(cases)[:1], *drawn.cases]
        calls = [captured.call(cases[label]) for label in labels]
        of_parameters(found, names, influence(module, names, calls))
    of_masks(found, pristine, roles_of(pristine, captured.args), cases)
    if graph is not None:
        of_attentions(found, graph, cases.values())
    of_outputs(found, captured.output_names, list(eager.values()))
    if not is_large:
        found.notes += fast_path_notes(module, captured, cases, eager)
    return found


def of_parameters(coverage: Coverage, names: Sequence[str], found: Influence) -> None:
    """Adds which parameters change an output."""
    coverage.parameters = len(names)
    coverage.without, coverage.unknown = found.absent, found.unknown
    if found.absent:
        coverage.notes.append(
            f"{_listed(found.absent, 'parameter')} no influence on any output: the check says "
            "nothing of what the file makes there."
        )
    if found.unknown:
        why = f": {found.reason}" if found.reason else ""
        coverage.notes.append(
            f"It is unknown whether {_named(found.unknown)} change an output{why}."
        )


def of_masks(
    coverage: Coverage,
    graph: Graph,
    roles: Sequence[Role],
    cases: Mapping[str, tuple[torch.Tensor, ...]],
) -> None:
    """Adds which predicates on the inputs of the captured graph were seen true and false."""
    predicates, sources = _predicates(graph)
    seen: list[set[bool]] = [set() for _ in predicates.outputs]
    inputs: dict[int, set[bool]] = {
        at: set()
        for at, role in enumerate(roles)
        if role.masks and not any(graph.inputs[at].name in names for names in sources)
    }
    for tensors in cases.values():
        for at, values in inputs.items():
            values.update(torch.eq(tensors[at], float(roles[at].visible or 0)).flatten().tolist())
        found = _results(predicates, tensors)
        if found is None:
            continue
        for values, result in zip(seen, found, strict=True):
            values.update(result.flatten().tolist())
    coverage.masks = len(seen) + len(inputs)
    for value, values, names in zip(predicates.outputs, seen, sources, strict=True):
        if len(values) < 2:
            where = "" if value.producer is None else f" at {value.producer.loc}"
            said = "true" if True in values else "false"
            coverage.halves.append(f"{value.name}{where}")
            coverage.notes.append(
                f"The mask {value.name}{where}, of {_named(sorted(names))}, was only ever {said}."
            )
    for at, values in inputs.items():
        if len(values) < 2:
            coverage.halves.append(graph.inputs[at].name)
            coverage.notes.append(
                f"The mask {graph.inputs[at].name} hid nothing in any case, or everything."
            )
    for value, role, *given in zip(graph.inputs, roles, *cases.values(), strict=True):
        if role.rows is not None:
            used = len(set(torch.cat([tensor.flatten() for tensor in given]).tolist()))
            coverage.tables[value.name] = (used, role.rows)


def of_attentions(
    coverage: Coverage, graph: Graph, cases: Iterable[tuple[torch.Tensor, ...]]
) -> None:
    """Adds the attentions of the optimised graph in which no row sees several keys."""
    nodes = [node for node in graph if node.op == _ATTENTION]
    wanted: list[Value] = []
    for node in nodes:
        for value in (input_of(node, "bias"), input_of(node, "mask")):
            if value is not None and _origin(value)[1] and value not in wanted:
                wanted.append(value)
    names = {value: value.name for value in wanted}
    light = _restricted(graph, [value.name for value in wanted])
    pending = {node.outputs[0].name: node for node in nodes}
    for tensors in cases:
        if not pending:
            return
        results = _results(light, tensors)
        if results is None:
            continue
        held = dict(zip(light.output_names, results, strict=True))
        sizes = _sizes(graph, tensors)
        for name, node in list(pending.items()):
            masking, length = masking_of(node), _size(scores_shape(node)[3], sizes)
            bias, mask = (
                None if value is None else held.get(names.get(value, ""))
                for value in (masking.bias, masking.mask)
            )
            if _several(length, bias, mask) and masking.window != 1:
                del pending[name]
    for node in pending.values():
        coverage.notes.append(
            f"No row of the attention at {node.loc} saw several keys in any case, so its weights "
            "were all 1 or 0."
        )


def of_outputs(
    coverage: Coverage, names: Sequence[str], outputs: Iterable[Sequence[torch.Tensor]]
) -> None:
    """Adds the outputs that have one value in all elements of all cases."""
    values: list[set[float]] = [set() for _ in names]
    for found in outputs:
        for seen, tensor in zip(values, found, strict=False):
            if tensor.numel() and len(seen) < 2 and not tensor.is_complex():
                wide = tensor.detach().double().nan_to_num()
                seen.update((float(wide.min()), float(wide.max())))
    for name, seen in zip(names, values, strict=True):
        if len(seen) == 1:
            coverage.notes.append(
                f"The output {name} is {next(iter(seen)):g} in every element of every case."
            )


def _results(graph: Graph, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...] | None:
    """The graph's outputs; None where a part of it doesn't run by itself: then nothing was seen."""
    try:
        return interpret(graph, tensors)
    except Exception:  # what a case shows is no reason to give the user nothing
        return None


def _predicates(graph: Graph) -> tuple[Graph, list[set[str]]]:
    """The comparisons and bools that the graph makes of its inputs alone, each once, as a graph's
    outputs; and the names of the inputs of each. What no output depends on hides nothing.
    """
    found = []
    read = {*backward_slice(graph.outputs, lambda value: False)[1]}
    made = (value for node in graph if node in read for value in node.outputs)
    for value in (*graph.inputs, *made):
        if not isinstance(value.type, TensorType) or value.dtype is not torch.bool:
            continue
        node = value.producer
        given = [] if node is None else node.operands
        of_bools = any(isinstance(v.type, TensorType) and v.dtype is torch.bool for v in given)
        if of_bools or value.is_constant:
            continue
        names, is_light = _origin(value)
        if names and is_light:
            found.append(value.name)
    light = _restricted(graph, found)
    distinct = list(dict.fromkeys(light.outputs))[:_MOST_MASKS]
    light.set_outputs(distinct, [value.name for value in distinct])
    return light, [_origin(value)[0] for value in distinct]


def _restricted(graph: Graph, names: Sequence[str]) -> Graph:
    """The part of a graph that computes these values, equal ones once."""
    light = clone(graph)
    by_name = {value.name: value for value in light.values()}
    light.set_outputs([by_name[name] for name in names], list(names))
    run(light, "dce,cse,dce")
    return light


def _origin(value: Value) -> tuple[set[str], bool]:
    """The inputs that a value depends on, and whether it needs no weight and no attention."""
    names: set[str] = set()
    stack, seen = [value], set[Value]()
    while stack:
        held = stack.pop()
        if held in seen:
            continue
        seen.add(held)
        if held.is_constant:
            is_weight = isinstance(held.type, TensorType) and held.dtype.is_floating_point
            if is_weight and held.data is not None and held.data.numel() > 1:
                return names, False
            continue
        node = held.producer
        if node is None:
            names.add(held.name)
            continue
        if node.op.startswith("attn."):
            return names, False
        stack.extend(node.operands)
    return names, True


def _sizes(graph: Graph, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    return {
        str(dim): size
        for value, tensor in zip(graph.inputs, tensors, strict=True)
        for dim, size in zip(value.shape, tensor.shape, strict=True)
    }


def _size(dim: Any, sizes: Mapping[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    return int(substitute(dim, sizes)) if symbols_of(dim) <= sizes.keys() else 2


def _several(length: int, bias: torch.Tensor | None, mask: torch.Tensor | None) -> bool:
    visible = None if mask is None else mask
    if bias is not None:
        shown = bias > _HIDING
        visible = shown if visible is None else visible & shown
    if visible is None or length < 2:
        return length > 1
    if visible.shape[-1] == 1:
        return bool(visible.any())
    return bool((visible.sum(-1) > 1).any())


def _storage(weight: torch.Tensor) -> int:
    return weight.untyped_storage().data_ptr() if weight.layout is torch.strided else 0


def _named(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _listed(names: Sequence[str], what: str) -> str:
    have = "has" if len(names) == 1 else "have"
    return f"{counted(len(names), what)} ({_named(names)}) {have}"
