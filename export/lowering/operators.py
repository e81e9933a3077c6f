"""Whether a finished graph holds only operators that its target's opset has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.context import signature_of
from attngraph.export.target import Target


def require_operators(nodes: Sequence[ir.Node], target: Target) -> None:
    """Raises LoweringError at a node that the target's opset lacks, or that is none of ONNX's own
    operators in a portable file, whoever wrote the lowering it comes from.
    """
    if not target.operators:
        return
    for node in with_branches(nodes):
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        why = target.refuses(name) or ("" if node.domain else _misfit(node, target.opset))
        if why:
            where = node.metadata_props.get("attngraph.loc") or "no line of the model"
            raise LoweringError(
                f"{name}, which {where} comes to, can't be in the file, for {why}: leave out "
                f"{'--portable' if node.domain else '--opset'}, or register another lowering with "
                "@attngraph.export.register_lowering."
            )


def _misfit(node: ir.Node, opset: int) -> str:
    """Why a standard operator is none of that opset as it is used here; "" where it is one."""
    signature = signature_of(node.op_type, opset)
    if signature is None:
        return f"opset {opset} lacks it"
    formal = signature.inputs
    for index, value in enumerate(node.inputs):
        if index >= len(formal) and not formal[-1].variadic:
            return f"opset {opset} has it with {len(formal)} inputs"
        kinds = formal[min(index, len(formal) - 1)].type_constraint.allowed_types
        dtypes = {kind.dtype for kind in kinds}
        if value is not None and value.dtype is not None and value.dtype not in dtypes:
            return f"opset {opset} hasn't got it in {value.dtype.name.lower()}"
    if unknown := sorted(set(node.attributes) - signature.params_map.keys()):
        return f"opset {opset} has it without {' and '.join(unknown)}"
    return ""


def with_branches(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """The nodes, and those of the graphs among their attributes."""
    for node in nodes:
        yield node
        for held in node.attributes.values():
            if held.type == ir.AttributeType.GRAPH:
                yield from with_branches(held.as_graph())
