"""The sizes that a file says it is right for, against those that it checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx_ir
import sympy

from attngraph.errors import ParityError
from attngraph.export.lowering.size_guard import is_guarded
from attngraph.ir.conditions import shown
from attngraph.ir.ranges import GUARD_PREFIX, RANGES_KEY, Ranges


def require_checked(path: Path, metadata: Mapping[str, str]) -> None:
    """Raises ParityError where a file of attngraph's doesn't check the sizes that it tells."""
    ranges = Ranges.of_file(metadata, path)
    limits = list(ranges.limits())
    graph = onnx_ir.load(path).graph
    checks = [node for node in graph if (node.name or "").startswith(GUARD_PREFIX)]
    if RANGES_KEY not in metadata or not (limits or ranges.axes or checks):
        return
    told = [_parts(node.name or "") for node in checks]
    of_dims = (limit for limit in limits if limit.args[0].is_Symbol)
    ends = [limit.args[1] for limit in of_dims if isinstance(limit, sympy.LessThan)]
    divisors = {number for node in checks for number in _divisors(node)}
    is_whole = {int(end) + 1 for end in ends if end.is_Integer} <= divisors
    required = ", ".join([*map(shown, limits), *(axis.told for axis in ranges.axes)])
    if told == [_parts(required)] and is_whole and is_guarded(list(graph), graph.outputs):
        return
    raise ParityError(
        f"{path} says that its sizes have {required or 'no limits'}, and doesn't check that as "
        "attngraph wrote it: the file was changed. Optimize the model again."
    )


def _parts(conditions: str) -> list[str]:
    return sorted(conditions.removeprefix(GUARD_PREFIX).split(", "))


def _divisors(check: onnx_ir.Node) -> Iterator[int]:
    """The numbers that sizes are divided by before the check looks whether 0 is left of them."""
    stack = [check]
    while stack:
        node = stack.pop()
        divisor = node.inputs[1] if node.op_type == "Div" else None
        if divisor is not None and divisor.const_value is not None:
            yield from divisor.const_value.numpy().flatten().tolist()
        above = (value.producer() for value in node.inputs if value is not None)
        stack += [producer for producer in above if producer is not None]
