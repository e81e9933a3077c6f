"""linearize: every product of activations with one constant matrix becomes `aten.linear`.

`matmul`, `mm`, `addmm` and einsums are read as contractions over named axes; the weight is laid out
once as (out, in), so that projections look alike however they were written.
"""

from __future__ import annotations

from attngraph.analysis.attention.roles import Stage, cheapest, stages
from attngraph.analysis.layout.axes import Atom, Axes, Operand, fresh_axes, resolve, top
from attngraph.analysis.layout.contraction import Contraction, read_contraction
from attngraph.ir import Builder, Graph, Node, Remark, Value
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.materialize import materialize

_OPS = frozenset(["aten.matmul", "aten.mm", "aten.addmm", "aten.einsum"])


class Linearize(GraphPass, name="linearize", exact=True):
    """Turns every product of activations with a constant matrix into `aten.linear`."""

    def run(self, graph: Graph) -> list[Remark]:
        build, checked = Builder(graph), Checked(graph, self.name)
        for node in list(graph):
            if node.op in _OPS and node.output.dtype.is_floating_point:
                _linearize(build, checked, node)
        return checked.remarks


def _linearize(build: Builder, checked: Checked, node: Node) -> None:
    output = fresh_axes(node.output.shape)
    product = read_contraction(node, output)
    if product is None or product.factor != 1.0 or not product.summed:
        return
    for x, weight in ((product.left, product.right), (product.right, product.left)):
        weight = top(weight)
        if weight.value.is_constant and not top(x).value.is_constant:
            result = _rewrite(build, node, product, x, weight, output)
            if result is not None:
                checked.replace([(node.output, result)])
            return


def _rewrite(
    build: Builder, node: Node, product: Contraction, x: Operand, weight: Operand, output: Axes
) -> Value | None:
    summed = set(resolve(product.summed))
    dtype = weight.value.dtype
    if x.value.dtype != dtype:
        return None
    candidates = [s for s in stages(x) if s.factor == 1.0 and s.operand.value.dtype == dtype]
    rows, columns = set(candidates[-1].operand.atoms), set(weight.atoms)
    if rows & columns != summed or columns == summed:
        return None
    # Outputs in the order they leave, inputs in the order in which x holds them.
    features = tuple(a for dim in output for a in resolve(dim) if a in columns)
    chosen = _source(candidates, summed)
    if chosen is None or set(features) | summed != columns:
        return None
    stage, lead, inner = chosen
    bias = _bias(product, features)
    if bias is None and product.addends:
        return None
    build.at(node, node.loc)
    source = materialize(build, stage.operand, (*lead, inner))
    matrix = materialize(build, weight, (features, inner))
    vector = None if bias is None else materialize(build, bias, (features,))
    result = build("aten.linear", source, matrix, vector)
    return materialize(build, Operand(result, (*lead, features)), output)


def _source(
    candidates: list[Stage], summed: set[Atom]
) -> tuple[Stage, Axes, tuple[Atom, ...]] | None:
    """The stage, its leading dims and the summed atoms: the latter must be innermost."""
    for stage in reversed(candidates):
        atoms = stage.operand.atoms
        split = len(atoms) - len(summed)
        if set(atoms[split:]) != summed:
            continue
        lead = tuple(
            kept
            for dim in stage.operand.dims
            if (kept := tuple(a for a in dim if a.const is None and a not in summed))
        )
        target: Axes = (*lead, atoms[split:])
        best = cheapest(candidates, target)
        if best is not None:
            return best, lead, atoms[split:]
    return None


def _bias(product: Contraction, features: tuple[Atom, ...]) -> Operand | None:
    """A constant that is added once to each output feature."""
    if len(product.addends) != 1:
        return None
    operand, factor = product.addends[0]
    operand = top(operand)
    fits = set(operand.atoms) == set(features)
    if factor != 1.0 or not fits or not operand.value.is_constant:
        return None
    return operand
