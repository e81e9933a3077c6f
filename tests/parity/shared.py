"""What a graph builds besides the arithmetic of its layers: positions, masks and sizes."""

from __future__ import annotations

from collections import Counter

from attngraph.compiling.compiler import Model, analyse
from attngraph.export.lowering.lower import lower
from attngraph.ir import Graph, Node, TensorType, Value
from tests.corpus.architectures import FirstTensor, build

_BUILDING = """Range Sin Cos Exp Log Pow Floor Ceil Mod CumSum Trilu Shape Size Min Abs Sign Neg
    Less LessOrEqual Greater GreaterOrEqual And Or Not Xor GatherND ConstantOfShape Expand"""
BUILDING = frozenset(_BUILDING.split())
"""ONNX operators that positions, masks and sizes are made of, and a layer's arithmetic isn't."""


def compiled(row: str, attention: str, *, padded: bool = True) -> Graph:
    """The optimised graph of a row of the corpus; not `padded`, without its attention mask."""
    built = build(row, attention)
    args, dims, module = built.args, built.dynamic_shapes, built.module
    if not padded:
        assert isinstance(module, FirstTensor)
        kept = [name != "attention_mask" for name in built.input_names]
        names = (name for name, keep in zip(built.input_names, kept, strict=True) if keep)
        module = FirstTensor(module.model, tuple(names), {})
        args = tuple(arg for arg, keep in zip(args, kept, strict=True) if keep)
        if dims is not None:
            dims = (tuple(d for d, keep in zip(dims[0], kept, strict=True) if keep),)
    return analyse(Model(module.eval(), None, args, {}, dims))[0]


def built_of(graph: Graph) -> Counter[str]:
    """The ops that read no input and no matrix, not even through others, or give no floats."""
    found: Counter[str] = Counter()
    data, weights = set(graph.inputs), {v for v in graph.constants.values() if _is_matrix(v)}
    for node in graph:
        reads_data = any(value in data for value in node.inputs)
        if any(value in weights for value in node.inputs):
            weights.update(node.outputs)
        elif _gives_floats(node) and reads_data:
            data.update(node.outputs)
        else:
            data.update(node.outputs if reads_data else ())
            found[node.op] += 1
    return found


def _is_matrix(value: Value) -> bool:
    return value.dtype.is_floating_point and sum(size != 1 for size in value.shape) > 1


def _gives_floats(node: Node) -> bool:
    types = [value.type for value in node.outputs]
    return any(isinstance(item, TensorType) and item.dtype.is_floating_point for item in types)


def assert_built_once(few: Graph, many: Graph) -> None:
    """A graph with more layers builds what the one with fewer layers builds, and nothing else."""
    assert built_of(many) == built_of(few)
    ops = [Counter(node.op_type for node in lower(graph).graph) for graph in (few, many)]
    added = ops[1] - ops[0]
    assert added
    assert not BUILDING & added.keys(), added
