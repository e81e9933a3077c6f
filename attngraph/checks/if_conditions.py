"""The conditions of a file's `If` nodes, as functions of the sizes of its inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import onnx_ir as ir

from attngraph.export.lowering.operators import with_branches

Shapes: TypeAlias = Mapping[str, Sequence[Any]]
"""The sizes of each input by its name: an integer, or one integer for each of C candidates."""
_DEPTH = 256
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Add": numpy.add,
    "Sub": numpy.subtract,
    "Mul": numpy.multiply,
    "Min": numpy.minimum,
    "Max": numpy.maximum,
    "Less": numpy.less,
    "LessOrEqual": numpy.less_equal,
    "Greater": numpy.greater,
    "GreaterOrEqual": numpy.greater_equal,
    "Equal": numpy.equal,
    "And": numpy.logical_and,
    "Or": numpy.logical_or,
    "Not": numpy.logical_not,
    "Abs": numpy.abs,
    "Neg": numpy.negative,
}
_SAME = ("Identity", "Squeeze", "Unsqueeze", "Reshape", "Cast")
"""Ops that keep the elements of a list of sizes. A list stands for a scalar too."""


@dataclass(frozen=True)
class Condition:
    """The condition of one or several `If` nodes. `name` is that of the first."""

    name: str
    value: ir.Value

    def holds(self, shapes: Shapes) -> Any | None:
        """Whether it holds for each of the candidates, (C,) bool; None where sizes don't decide."""
        found = _elements(self.value, shapes, 0)
        return None if found is None or found.shape[1] != 1 else found[:, 0].astype(bool)


def conditions_of(model: ir.Model) -> list[Condition]:
    """Each distinct condition in the order of the nodes, those inside branches and loops too."""
    found: dict[ir.Value, Condition] = {}
    for node in with_branches(model.graph):
        if node.op_type == "If" and (value := node.inputs[0]) is not None:
            found.setdefault(value, Condition(node.name or str(node.outputs[0].name), value))
    return list(found.values())


def _elements(value: ir.Value | None, shapes: Shapes, depth: int) -> Any | None:
    """The elements of a small integer tensor for each candidate, (C, n)."""
    if value is None or depth > _DEPTH:
        return None
    if value.const_value is not None:
        data = value.const_value.numpy()
        return data.reshape(1, -1) if data.size <= _DEPTH else None
    node = value.producer()
    if node is None:
        return None
    if node.op_type == "Constant":
        return _constant(node)
    if node.op_type == "Shape":
        return _shape(node, shapes)
    read = [_elements(each, shapes, depth + 1) for each in node.inputs]
    if read and read[0] is not None and node.op_type in _SAME:
        return read[0]
    given = [each for each in read if each is not None]
    return _computed(node.op_type, given) if given and len(given) == len(read) else None


def _computed(kind: str, given: Sequence[Any]) -> Any | None:
    first, *others = given
    match kind:
        case "Gather" if others[0].shape[0] == 1:
            return first[:, others[0][0]]
        case "Concat":
            count = max(each.shape[0] for each in given)
            return numpy.concatenate(
                [numpy.broadcast_to(each, (count, each.shape[1])) for each in given], 1
            )
        case "Slice" if len(others) < 4 and all(each.shape == (1, 1) for each in others):
            return first[:, int(others[0][0, 0]) : int(others[1][0, 0])]
        case "Div" if (others[0] > 0).all():
            return numpy.floor_divide(first, others[0])
        case "Mod" if (others[0] > 0).all():
            return numpy.mod(first, others[0])
    if kind not in _ARITHMETIC:
        return None
    if not others:
        return _ARITHMETIC[kind](first)
    return functools.reduce(_ARITHMETIC[kind], given)


def _constant(node: ir.Node) -> Any | None:
    for held in node.attributes.values():
        match held.name:
            case "value":
                return held.as_tensor().numpy().reshape(1, -1)
            case "value_int":
                return numpy.array([[held.as_int()]])
            case "value_ints":
                return numpy.array([list(held.as_ints())])
    return None


def _shape(node: ir.Node, shapes: Shapes) -> Any | None:
    source = node.inputs[0]
    if source is None or source.name is None or source.name not in shapes:
        return None
    sizes = shapes[source.name]
    ends = {name: held.as_int() for name, held in node.attributes.items()}
    chosen = sizes[ends.get("start", 0) : ends.get("end", len(sizes))]
    columns = numpy.broadcast_arrays(*(numpy.atleast_1d(size) for size in chosen))
    return numpy.stack(columns, 1)
