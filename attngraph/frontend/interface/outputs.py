"""A model's outputs as the graph's, named after the structure that it returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.export.graph_signature import ExportGraphSignature, OutputKind, TensorArgument
from torch.utils._pytree import TreeSpec

from attngraph.errors import CaptureError
from attngraph.ir.graph import Graph, Value, free_name


def output_names(spec: TreeSpec) -> list[str]:
    """One name per leaf: the keys of dicts and ModelOutputs, `output_0` and so on elsewhere.

    Nested names are joined: the second tensor under key `states` is `states_1`.
    """
    paths = list(_paths(spec))
    names = ["_".join(path if path and not path[0].isdigit() else ["output", *path])
             for path in paths]  # fmt: skip
    if len(paths) == 1 and not paths[0]:
        return ["output_0"]
    return names


def _paths(spec: TreeSpec) -> Iterator[list[str]]:
    if spec.is_leaf():
        yield []
        return
    children = spec.children()
    for key, child in zip(_keys(spec.type, spec.context, len(children)), children, strict=True):
        for path in _paths(child):
            yield [key, *path]


def _keys(kind: Any, context: Any, count: int) -> list[str]:
    """A node's keys; pytree containers keep theirs in the context, each in its own nesting."""
    fields = getattr(kind, "_fields", None)
    if fields is not None and len(fields) == count:
        return [str(field) for field in fields]
    while isinstance(context, (list, tuple)) and context:
        if len(context) == count and all(isinstance(key, str) for key in context):
            return list(context)
        nested = [item for item in context if isinstance(item, (list, tuple)) and item]
        context = nested[0] if nested else None
    return [str(position) for position in range(count)]


@dataclass(frozen=True)
class Outputs:
    """A model's outputs: those of the graph by name, and what else its `spec` has.

    `constants` are the leaves that the graph doesn't compute; `numbers` and `complexes` are the
    positions of those that are no tensors to the model, and of complex ones.
    """

    spec: TreeSpec
    names: tuple[str, ...]
    constants: Mapping[int, Any]
    numbers: frozenset[int]
    complexes: frozenset[int]


def set_outputs(
    graph: Graph, spec: TreeSpec | None, signature: ExportGraphSignature, results: Sequence[Any]
) -> Outputs:
    """Gives the graph those of a program's `results` that the model returns, with names.

    Raises CaptureError if there is no tensor among them.
    """
    if spec is None:
        raise CaptureError("The exported program doesn't say what structure it returns.")
    leaves = [
        (result, output.arg)
        for result, output in zip(results, signature.output_specs, strict=True)
        if output.kind == OutputKind.USER_OUTPUT
    ]
    computed = {leaf: value for leaf, (value, _) in enumerate(leaves) if isinstance(value, Value)}
    if not computed:
        raise CaptureError("The model returns no tensor, so there is nothing to compute.")
    values = list(computed.values())
    labels = output_names(spec)
    names = _beside_inputs(_distinct_names([labels[leaf] for leaf in computed]), values, graph)
    graph.set_outputs(values, names)
    return Outputs(
        spec,
        tuple(names),
        {leaf: result for leaf, (result, _) in enumerate(leaves) if leaf not in computed},
        frozenset(leaf for leaf in computed if not isinstance(leaves[leaf][1], TensorArgument)),
        frozenset(leaf for leaf, value in computed.items() if value.dtype.is_complex),
    )


def _distinct_names(names: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in names:  # ONNX has no output without a name
        found[free_name(name or "output", found)] = None
    return list(found)


def _beside_inputs(names: Sequence[str], values: Sequence[Value], graph: Graph) -> list[str]:
    """Names of outputs that no other value has as an input: a present isn't called `past_0` too."""
    inputs = {value.name: value for value in graph.inputs}
    taken, found = {*inputs, *names}, []
    for name, value in zip(names, values, strict=True):
        if inputs.get(name, value) is not value:
            present = f"present{name.removeprefix('past')}" if name.startswith("past") else name
            others = (f"{name}.{count}" for count in range(1, len(taken) + 2))
            name = next(each for each in (present, *others) if each not in taken)
            taken.add(name)
        found.append(name)
    return found
