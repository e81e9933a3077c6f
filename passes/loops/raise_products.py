"""raise-products: outer products and sums of products are matrix products, in a loop's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attngraph.ir import Builder, Dim, DimInfo, Graph, Node, Remark, Value
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.dims import bounds, same_shape
from attngraph.ir.ops import attribute
from attngraph.ir.traits import MULTIPLICATIVE, SUM
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass

_REASSOCIATES = "A sum of products with a vector is a product of matrices."
_SIDE, _ELEMENTS = 8, 256
"""What a matrix has at least. For 16 × 16 to 128 × 128 a multiplication and a sum take 1.3 to 3.3 ×
the time of a product of matrices, and a multiplication that makes an outer product 1.1 to 2.4 ×;
both take as long for 8 × 8, and less for narrower ones (AMD EPYC, one thread, 2026-11-30)."""


class RaiseProducts(GraphPass, name="raise-products", exact=False):
    """`(x * v).sum(d)` is a matrix product, where v is a vector along d for each matrix of x, and
    so is `u * v` of a column and a row.

    d is one of the last two axes of x, and v has size 1 along the other. A multiplication writes
    the whole product, for a sum to read, and onnxruntime's is slow where both factors are
    broadcast. With `exact_only` no sum becomes a product.
    """

    exact_only: bool = False

    def run(self, graph: Graph) -> list[Remark]:
        build, checked = Builder(graph), Checked(graph, self.name, exact_only=self.exact_only)
        for node in list(graph):
            build.at(node, node.loc)
            if node.op in SUM and checked.allows(_REASSOCIATES):
                found = _vector_and_matrix(graph, node)
                if found is not None:
                    pair = node.output, _product(build, node, *found)
                    checked.replace([pair], reassociates=_REASSOCIATES)
            elif _is_multiplication(node) and _is_outer(node, graph.dims):
                checked.replace([(node.output, build("aten.matmul", *_column_and_row(node)))])
        eliminate_dead_code(graph)
        return checked.remarks


def _is_multiplication(node: Node) -> bool:
    return node.op in MULTIPLICATIVE and "mul.Tensor" in node.op


def _is_large(shape: Sequence[Dim], dims: Mapping[str, DimInfo]) -> bool:
    if len(shape) < 2:
        return False
    rows, columns = (bounds(size, dims)[0] for size in shape[-2:])
    return min(rows, columns) >= _SIDE and rows * columns >= _ELEMENTS


def _column_and_row(node: Node) -> list[Value]:
    """The factors, that without columns first."""
    return sorted(node.operands, key=_has_columns)


def _has_columns(value: Value) -> bool:
    return len(value.shape) > 0 and value.shape[-1] != 1


def _is_outer(node: Node, dims: Mapping[str, DimInfo]) -> bool:
    factors, shape = _column_and_row(node), node.output.shape
    if len(factors) < 2 or min(len(each.shape) for each in factors) < 2:
        return False
    if not node.output.dtype.is_floating_point or factors[0].dtype != factors[1].dtype:
        return False
    ends = [list(each.shape[-2:]) for each in factors]
    return ends == [[shape[-2], 1], [1, shape[-1]]] and _is_large(shape, dims)


def _vector_and_matrix(graph: Graph, node: Node) -> tuple[Value, Value, int] | None:
    """v, x and the axis that is summed, -1 or -2, of a product that nothing else reads."""
    source = node.inputs[0]
    product = None if source is None else source.producer
    if source is None or product is None or not _is_multiplication(product):
        return None
    if len(source.uses) != 1 or source in graph.outputs:
        return None
    rank, axes = len(source.shape), attribute(node, "dim")
    if not axes or len(axes) != 1 or axes[0] % rank < rank - 2:
        return None
    if not source.dtype.is_floating_point or not _is_large(source.shape, graph.dims):
        return None
    axis = axes[0] % rank - rank
    for v, x in (product.inputs, product.inputs[::-1]):
        if x is None or v is None or not x.dtype == v.dtype == node.output.dtype:
            continue
        if same_shape(x.shape, source.shape) and _is_vector(v.shape, x.shape, axis):
            return v, x, axis
    return None


def _is_vector(vector: Sequence[Dim], matrices: Sequence[Dim], axis: int) -> bool:
    """Whether it has one number for each place along the axis, for each matrix or for all."""
    size: list[Dim] = [1] * len(matrices)
    size[axis] = matrices[axis]
    whole = [1] * (len(matrices) - len(vector)) + list(vector)
    return same_shape(whole, [*matrices[:-2], *size[-2:]]) or same_shape(whole, size)


def _product(build: Builder, node: Node, v: Value, x: Value, axis: int) -> Value:
    batch = v.shape[:-2]
    if axis == -1:
        column = build("aten.reshape", v, shape=[*batch, x.shape[-1], 1])
        made = build("aten.matmul", x, column)
    else:
        row = build("aten.reshape", v, shape=[*batch, 1, x.shape[-2]])
        made = build("aten.matmul", row, x)
    return build.reshape(made, node.output.shape)
