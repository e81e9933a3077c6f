"""From IR to an ONNX model: every node through its lowering, names and source lines kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from attngraph.analysis.values.complex_parts import Splittable, is_complex
from attngraph.analysis.values.denormals import KEPT_KEY, denormal_at
from attngraph.errors import AttngraphError, LoweringError
from attngraph.export.kernels import Choice, choose_all
from attngraph.export.lowering import find_lowering, registered
from attngraph.export.lowering.emission.buffers import CAPACITY, Buffers
from attngraph.export.lowering.emission.context import MICROSOFT, LoweringContext
from attngraph.export.lowering.emission.factors import keep_doubles
from attngraph.export.lowering.emission.values import TracedValue, onnx_dtype, onnx_shape
from attngraph.export.lowering.fallback.decompose import decompose
from attngraph.export.lowering.fallback.formulas import FORMULAS
from attngraph.export.lowering.operators import require_operators, with_branches
from attngraph.export.lowering.size_guard import guard_inputs, guard_output, is_guarded, limits_of
from attngraph.export.target import Target, parse_target
from attngraph.ir import Graph, Node, TensorType, Value
from attngraph.ir.graph import free_name
from attngraph.ir.traits import RANDOM
from attngraph.versions import own_version

IR_VERSION = 10


def lower(
    graph: Graph,
    *,
    target: str | Target = "cpu",
    name: str | None = None,
    kernels: Mapping[Node, Choice] | None = None,
    buffers: Buffers | None = None,
) -> ir.Model:
    """The ONNX model of a graph, in the target's opset. Weights are shared with the graph.

    `kernels` is the form of each attention; the kernel table's choice where it is left out. With
    `buffers`, which `require_in_place` has seen, the pasts are those of a static cache.

    An ONNX value has the name of its IR value, except that a graph output has its output name (see
    `value_names`); sizes have the user's names. The same graph gives the same bytes.

    A run of the model fails for sizes outside of `Ranges.of(graph)`.

    Raises LoweringError naming the op, its source line and its module where it has no lowering, or
    one into operators that the target's opset lacks, or a portable file.
    """
    target = parse_target(target) if isinstance(target, str) else target
    static = buffers is not None
    kernels = choose_all(graph, target, static=static) if kernels is None else kernels
    context = LoweringContext(
        graph, target, value_names(graph), kernels, lower_body=_lower_body, buffers=buffers
    )
    lengths: list[ir.Value] = []
    if buffers is not None and buffers.length is not None:
        lengths.append(_vector(buffers.length))
        context.define(buffers.dim, lengths[0])
    for value in graph.inputs:
        context.bind(value, _input(value), own=True)
    if buffers is not None and not lengths:
        context.define(buffers.dim, _tokens_held(context, buffers))
    inputs = [*(context.value(value) for value in graph.inputs), *lengths]
    guard_inputs(context)
    for node in graph:
        _lower_node(context, node)
    context.node = None
    keep_doubles(context)
    if limits_of(context) and not is_guarded(
        context.nodes, list(map(context.value, graph.outputs))
    ):
        guard_output(context)
    outputs = _outputs(graph, context, output_names(graph))
    nodes, used = _reachable(context.nodes, outputs)
    if buffers is not None:
        axes = buffers.by_name
        for buffer in (*inputs, *outputs):
            if buffer.name in axes and buffer.shape is not None:
                sizes = list(buffer.shape)
                sizes[axes[buffer.name]] = ir.SymbolicDim(CAPACITY)
                buffer.shape = ir.Shape(sizes)
    initializers = [value for value in context.initializers.values() if value in used]
    require_operators(nodes, target)
    opsets = {"": target.opset}
    if any(node.domain == MICROSOFT for node in with_branches(nodes)):
        opsets[MICROSOFT] = 1
    onnx_graph = ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=initializers,
        opset_imports=opsets,
        name=name or graph.name,
    )
    model = ir.Model(
        onnx_graph,
        ir_version=IR_VERSION,
        producer_name="attngraph",
        producer_version=own_version(),
    )
    if (place := denormal_at(graph)) is not None:
        model.metadata_props[KEPT_KEY] = f"{place.op} at {place.loc}"
    return model


def _lower_body(context: LoweringContext, body: Graph, captured: Mapping[Value, Value]) -> ir.Graph:
    """A loop's body as a subgraph. `captured` inputs are values of the graph around it.

    Names are unique over both graphs, as ONNX wants. Constants lie in the outer one, and so does
    what doesn't change from step to step.
    """
    named = [context.unique(f"{body.name}/{name}") for name in body.output_names]
    names = dict(reversed([*zip(body.outputs, named, strict=True)]))
    for value in body.values():
        if value not in names or value.producer is None:
            names[value] = context.unique(f"{body.name}/{value.name}")
    kernels = choose_all(body, context.target)
    inner = LoweringContext(
        body,
        context.target,
        names,
        kernels,
        lower_body=_lower_body,
        outer=context,
        captured=captured,
    )
    inputs = []
    for value in body.inputs:
        if value not in captured:
            inner.bind(value, _input(value, names[value]), own=True)
            inputs.append(inner.value(value))
    for node in body:
        _lower_node(inner, node)
    inner.node = None
    keep_doubles(inner)
    outputs = _outputs(body, inner, named)
    nodes, _ = _reachable(inner.nodes, outputs)
    context.initializers.update(inner.initializers)
    nodes, invariant = _apart(nodes, {*inputs, *outputs})
    context.nodes += invariant
    return ir.Graph(inputs, outputs, nodes=nodes, name=body.name)


def _apart(nodes: Sequence[ir.Node], own: set[ir.Value]) -> tuple[list[ir.Node], list[ir.Node]]:
    """A body's nodes, and those of them that compute the same in each step, which has `own` values.

    The latter can run before the loop: no operator has an effect, and none draws random numbers.
    """
    inside, before = [], []
    for node in nodes:
        holds = any(held.type == ir.AttributeType.GRAPH for held in node.attributes.values())
        if holds or not own.isdisjoint((*node.inputs, *node.outputs)):
            inside.append(node)
            own.update(node.outputs)
        else:
            before.append(node)
    return inside, before


def value_names(graph: Graph) -> dict[Value, str]:
    """The ONNX name of each IR value: its own, or for a graph output the name of that output.

    An inner value whose name an output has taken gets a suffix.
    """
    inputs = {*graph.inputs, *graph.constants.values()}
    outputs = output_names(graph)
    taken = {value.name for value in graph.inputs} | {*outputs}
    names: dict[Value, str] = {value: value.name for value in graph.inputs}
    for value, output in zip(graph.outputs, outputs, strict=True):
        if value not in inputs:
            names.setdefault(value, output)
    for value in graph.values():
        if value not in names:
            names[value] = _free(value.name, taken)
    return names


def output_names(graph: Graph) -> list[str]:
    """The graph's output names; one that an input or an earlier output has gets a suffix.

    An input that is returned under its own name keeps it.
    """
    taken = {value.name for value in graph.inputs}
    names = []
    for value, name in zip(graph.outputs, graph.output_names, strict=True):
        unchanged = value in graph.inputs and value.name == name and name not in names
        names.append(name if unchanged else _free(name, taken))
    return names


def _free(name: str, taken: set[str]) -> str:
    """The name, or the name with the first free number, which is then taken."""
    found = free_name(name, taken, ".")
    taken.add(found)
    return found


def _input(value: Value, name: str | None = None) -> TracedValue:
    if not isinstance(value.type, TensorType):
        raise LoweringError(f"Input {value.name} is a {value.type}; pass it as a tensor.")
    return TracedValue(
        name=name or value.name,
        type=ir.TensorType(onnx_dtype(value.dtype)),
        shape=onnx_shape(value.type),
    )


def _vector(name: str) -> TracedValue:
    """An input (1,) i64."""
    return TracedValue(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))


def _tokens_held(context: LoweringContext, buffers: Buffers) -> ir.Value:
    """How many tokens a mask counts beside the new ones, (1,) i64."""
    inputs = {value.name: context.value(value) for value in context.graph.inputs}
    assert buffers.mask is not None
    total, new = (
        context.op("Shape", inputs[name], start=1, end=2) for name in (buffers.mask, buffers.ids)
    )
    return context.op("Sub", total, new)


def _advice(context: LoweringContext, node: Node) -> str:
    """What helps against an op that has no lowering, behind the sentence that says so."""
    if node.op in RANDOM or any(isinstance(each, Graph) for each in node.attrs.values()):
        return ""  # of a region, what its own op says
    if any(map(is_complex, (*node.inputs, *node.outputs))):
        found = Splittable(lambda transform: False).in_the_way(context.graph)
        what = f"{found.op} at {found.loc}" if found is not None else "One of the operators there"
        return (
            f" {what} has no form on the real and the imaginary parts of complex numbers: write it "
            "on z.real and z.imag."
        )
    return f" Register a lowering with @attngraph.export.register_lowering({node.op!r})."


def _without_form(node: Node, error: Exception) -> str:
    """That what the op is written with doesn't take its operands, and why if the error says so."""
    operands = [str(value.type) for value in node.operands]
    says = "" if isinstance(error, (LookupError, ArithmeticError)) else f" ({error!s:.200})"
    return f"no form of it takes {', '.join(operands) or 'these arguments'}{says}"


def _lower_node(context: LoweringContext, node: Node) -> None:
    context.node = node
    first = len(context.nodes)
    try:
        results = _results(context, node)
        missing = node.outputs[len(results) :]
        is_read = any(value.uses or value in context.graph.outputs for value in missing)
        if len(results) > len(node.outputs) or is_read:
            raise LoweringError(
                f"its lowering returned {len(results)} values where it has {len(node.outputs)}"
            )
    except Exception as error:
        reason = str(error) if isinstance(error, AttngraphError) else _without_form(node, error)
        raise LoweringError(
            f"{node.op} at {node.loc} can't be lowered to ONNX: {reason.rstrip('.')}."
            f"{_advice(context, node)}"
        ) from error
    created = {value for made in context.nodes[first:] for value in made.outputs}
    for value, result in zip(node.outputs, results, strict=False):
        if isinstance(value.type, TensorType) and result.dtype is not None:
            cast = context.cast(result, value.dtype)
            if cast is not result:
                result = cast
                created.add(cast)
        context.bind(value, result, own=result in created)
        created.discard(result)


def _results(context: LoweringContext, node: Node) -> list[ir.Value]:
    own, reason = registered(node.op), None
    parts = _parts(context, node) if own is None and node.op in FORMULAS else None
    if parts is None:
        lowering = own or find_lowering(node.op)
        try:
            results = None if lowering is None else lowering(context, node)
        except Exception as error:
            # torchlib's functions have gaps that torch's own decompositions may not have.
            if own is not None:
                raise
            results, reason = None, error
        if results is not None:
            return [results] if isinstance(results, ir.Value) else list(results)
        parts = _parts(context, node, formula=own is not None)
    if parts is None:
        other = " for these sizes and options" if node.op in FORMULAS else ""
        raise reason or LoweringError(f"it has no ONNX lowering{other}")
    for value, operand in zip(parts.inputs, filter(None, node.inputs), strict=True):
        context.alias(value, operand)
    for part in parts:
        if find_lowering(part.op) is None:
            raise reason or LoweringError(f"its part {part.op} has no ONNX lowering")
        for value, result in zip(part.outputs, _results(context, part), strict=False):
            result = context.cast(result, value.dtype)
            if result.shape is None:
                result.shape = onnx_shape(value.tensor_type)
            context.bind(value, result, own=False)
    return [context.value(value) for value in parts.outputs]


def _parts(context: LoweringContext, node: Node, *, formula: bool = True) -> Graph | None:
    return decompose(node, context.graph, lambda op: find_lowering(op) is not None, formula=formula)


def _outputs(graph: Graph, context: LoweringContext, names: Sequence[str]) -> list[ir.Value]:
    """The graph's outputs; what can't carry the output's name goes through an Identity."""
    outputs: list[ir.Value] = []
    for value, name in zip(graph.outputs, names, strict=True):
        result = context.value(value)
        if result.name != name or result in outputs:
            result = context.op("Identity", result)
            result.name = name
            result.dtype = onnx_dtype(value.dtype)
            result.shape = onnx_shape(value.tensor_type)
        outputs.append(result)
    return outputs


def _reachable(
    nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]
) -> tuple[list[ir.Node], set[ir.Value]]:
    """The nodes that the outputs need, in order, and every value those read."""
    needed = set(outputs)
    kept = []
    for node in reversed(nodes):
        if any(value in needed for value in node.outputs):
            kept.append(node)
            for inner in with_branches([node]):
                needed.update(value for value in inner.inputs if value is not None)
        else:
            for inner in with_branches([node]):
                for position in range(len(inner.inputs)):
                    inner.replace_input_with(position, None)
    return kept[::-1], needed
