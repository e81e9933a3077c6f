"""The ONNX graph under construction: nodes, and constants and sizes that are emitted once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import onnx
import onnx_ir as ir
import torch

from attngraph.errors import LoweringError
from attngraph.export.kernels import Choice
from attngraph.export.lowering.emission.buffers import Buffers
from attngraph.export.lowering.emission.runtime_sizes import Sizes
from attngraph.export.lowering.emission.trusted_kernels import lacking_half, rewritten
from attngraph.export.lowering.emission.values import TracedValue, onnx_dtype, onnx_shape
from attngraph.export.target import OPSET, Target
from attngraph.ir import Graph, Node, TensorType, Value
from attngraph.ir.dims import Dim
from attngraph.ir.ops import REQUIRED, op_def, split_inputs
from attngraph.ir.storage import place_of
from attngraph.ir.traits import LINEAR

MICROSOFT = "com.microsoft"

T = TypeVar("T")
LowerBody: TypeAlias = "Callable[[LoweringContext, Graph, Mapping[Value, Value]], ir.Graph]"


class LoweringContext:
    """The ONNX graph under construction, seen from the IR node that is being lowered.

    `cache` keeps what later nodes can share (masks, sizes), by any hashable key. The nodes run in
    the order in which they are emitted, so whatever is cached is defined for all that follows.
    `kernels` is the form chosen for each attention.

    A loop's body has a context of its own, whose `outer` is that of the graph around it;
    `captured` maps its inputs to the values of that graph which every step reads as they are.
    `lower_body` makes such a body, so that a loop's lowering needs none of the others.
    `buffers` says which pasts are those of a static cache.
    """

    def __init__(
        self,
        graph: Graph,
        target: Target,
        names: Mapping[Value, str],
        kernels: Mapping[Node, Choice],
        *,
        lower_body: LowerBody,
        outer: LoweringContext | None = None,
        captured: Mapping[Value, Value] | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        self.graph = graph
        self.target = target
        self.kernels = kernels
        self.buffers = buffers
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self.cache: dict[Hashable, Any] = {}
        self.node: Node | None = None
        self._names = names
        self._lower_body = lower_body
        self._outer = outer
        self._captured = captured or {}
        self._taken: set[str] = outer._taken if outer is not None else set()
        self._taken.update(names.values())
        self._counts: dict[str, int] = {}
        self._values: dict[Value, ir.Value] = {}
        self._plain: set[Hashable] | None = None
        self._sizes: Sizes = Sizes(self, graph.dims, None if outer is None else outer._sizes)

    def has(self, op_type: str, domain: str = "") -> bool:
        """Whether the file may hold such an operator."""
        return not self.target.refuses(f"{domain}.{op_type}" if domain else op_type)

    def args(self, node: Node) -> dict[str, Any]:
        """Every argument of the IR node by its schema name, defaults filled in.

        Tensors come as ONNX values (None where absent, a list where the schema says so), the rest
        as Python values in which sizes may be sympy expressions.
        """
        definition = op_def(node.op)
        grouped = split_inputs(definition, node.inputs, node.attrs)
        result: dict[str, Any] = {}
        for arg in definition.args:
            if arg.kind == "attr":
                value = node.attrs.get(arg.name, arg.default)
                result[arg.name] = None if value is REQUIRED else value
            elif isinstance(operand := grouped[arg.name], list):
                result[arg.name] = [None if v is None else self.value(v) for v in operand]
            else:
                result[arg.name] = None if operand is None else self.value(operand)
        return result

    def value(self, value: Value) -> ir.Value:
        """The ONNX value of an IR value; a constant becomes an initializer on first use."""
        found: ir.Value | None = self._values.get(value)
        if found is None and self._outer is not None and value in self._captured:
            return self._outer.value(self._captured[value])
        if found is None:
            if value.data is None:
                raise LoweringError(f"%{value.name} has no data, so it can't be written to ONNX.")
            key = ("stored", place_of(value.data))
            if key not in self.cache:
                name = self._names.get(value) or self.unique(value.name)
                self.cache[key] = self._initializer(name, value.data)
            found = self._values[value] = self.cache[key]
        return found

    def transposed(self, value: Value) -> ir.Value:
        """A matrix with its axes swapped.

        A weight that nothing else reads untransposed is transposed while it is being written, so
        no second copy of it is ever held; one that is read both ways is stored once.
        """
        if self._outer is not None and value in self._captured:
            return self._outer.transposed(self._captured[value])
        key = ("transposed", value if value.data is None else place_of(value.data))
        if key not in self.cache:
            if value.data is not None and self._only_transposed(value.data):
                name = self.unique(f"{self._names[value]}.T")
                self.cache[key] = self._initializer(name, value.data.t())
            else:
                self.cache[key] = self.op("Transpose", self.value(value), perm=[1, 0])
        result: ir.Value = self.cache[key]
        return result

    def derived(
        self,
        value: Value,
        name: str,
        make: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        kind: ir.DataType = ir.DataType.UINT8,
    ) -> ir.Value:
        """An initializer that `make` computes from a constant's data, whenever it is read.

        So no copy is held beside the constant. `name` tells what is made of it; of a `kind` with 4
        bits each byte has two, the first in the lower half.
        """
        assert value.data is not None
        key = ("derived", name, place_of(value.data))
        if key not in self.cache:
            unique = self.unique(f"{self._names.get(value, value.name)}.{name}")

            def packed() -> ir.TensorProtocol:
                stored = make().contiguous().numpy()
                if kind.bitwidth == 4:
                    return ir.PackedTensor(stored.reshape(-1), kind, shape=shape, name=unique)
                return ir.Tensor(stored.view(kind.numpy()).reshape(shape), name=unique)

            data = ir.LazyTensor(
                packed,
                dtype=kind,
                shape=ir.Shape(shape),
                name=unique,
            )
            self.cache[key] = self._stored(unique, data)
        result: ir.Value = self.cache[key]
        return result

    def bind(self, value: Value, result: ir.Value, *, own: bool) -> None:
        """Records the ONNX value of an IR value, which takes its name and type if it is `own`."""
        if own:
            result.name = self._names[value]
            if isinstance(value.type, TensorType):
                result.dtype = onnx_dtype(value.type.dtype)
                result.shape = onnx_shape(value.type)
            else:
                result.shape = ir.Shape([])
        self._values[value] = result
        self._sizes.learn(value, result)

    def define(self, name: str, size: ir.Value) -> None:
        """Makes an integer value the size of a dim, in whatever shapes it occurs."""
        self._sizes.define(name, size)

    def alias(self, value: Value, other: Value) -> None:
        """Maps an IR value of another graph to one of this graph's."""
        self._values[value] = self.value(other)

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        domain: str = "",
        dtype: ir.DataType | None = None,
        **attrs: Any,
    ) -> ir.Value:
        """Emits a node and returns its first output. Trailing inputs that are None are left out."""
        return self.ops(op_type, *inputs, domain=domain, dtype=dtype, **attrs)[0]

    def ops(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: int | Sequence[bool] = 1,
        domain: str = "",
        dtype: ir.DataType | None = None,
        **attrs: Any,
    ) -> tuple[ir.Value, ...]:
        """Emits a node with several outputs; a False in `outputs` leaves that output unnamed."""
        kept = list(inputs)
        while kept and kept[-1] is None:
            kept.pop()
        if (safe := rewritten(self, op_type, domain, kept, attrs)) is not None:
            return (safe,)
        wanted = (True,) * outputs if isinstance(outputs, int) else tuple(outputs)
        stem = f"{self._stem()}/{op_type}"
        results = [TracedValue(name=self.unique(stem) if named else "") for named in wanted]
        dtypes = [dtype or _output_dtype(op_type, domain, kept, attrs)]
        dtypes += [_output_dtype(op_type, domain, kept, {}, i) for i in range(1, len(results))]
        body = attrs.get("body")
        if isinstance(body, ir.Graph):  # what a loop gives has the dtypes that a step of it gives
            dtypes = [value.dtype for value in body.outputs]
        for result, known in zip(results, dtypes, strict=True):
            if known is not None:
                result.dtype = known
        is_own = op_type == "Cast" or body is not None
        lacking = None if is_own else lacking_half(self.target.provider, op_type, kept, attrs)
        if lacking is not None:
            return self._in_float32(lacking, op_type, kept, results, outputs, domain, attrs)
        attributes = {name: value for name, value in attrs.items() if value is not None}
        node = ir.Node(
            domain,
            op_type,
            kept,
            ir.convenience.convert_attributes(attributes),
            outputs=results,
            name=results[0].name,
        )
        if self.node is not None:
            node.metadata_props["attngraph.loc"] = str(self.node.loc)
        self.nodes.append(node)
        return tuple(results)

    def _in_float32(
        self,
        half: ir.DataType,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        results: Sequence[ir.Value],
        outputs: int | Sequence[bool],
        domain: str,
        attrs: Mapping[str, Any],
    ) -> tuple[ir.Value, ...]:
        """The op on float32, rounded to this `half` afterwards, as torch computes it on a CPU."""
        single = ir.DataType.FLOAT
        wide = [
            self.op("Cast", value, to=single)
            if value is not None and value.dtype == half
            else value
            for value in inputs
        ]
        found = self.ops(
            op_type,
            *wide,
            outputs=outputs,
            domain=domain,
            dtype=single if results[0].dtype == half else results[0].dtype,
            **attrs,
        )
        return tuple(
            self.op("Cast", value, to=half) if result.dtype == half else value
            for value, result in zip(found, results, strict=True)
        )

    def constant(
        self, value: Any, dtype: torch.dtype | None = None, *, name: str = "constant"
    ) -> ir.Value:
        """A number, a nested list or a tensor as an initializer; equal ones are stored once."""
        tensor = value if isinstance(value, torch.Tensor) else _tensor(value, dtype)
        if dtype is not None:
            tensor = tensor.to(dtype)
        tensor = tensor.detach().cpu().contiguous()
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        key = ("constant", tensor.dtype, tuple(tensor.shape), content)
        if key not in self.cache:
            self.cache[key] = self._initializer(self.unique(name), tensor)
        result: ir.Value = self.cache[key]
        return result

    def cast(self, value: ir.Value, dtype: torch.dtype) -> ir.Value:
        """The value in that dtype; itself where it has it already."""
        if value.dtype == onnx_dtype(dtype):
            return value
        return self.op("Cast", value, to=onnx_dtype(dtype))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned the first time; later nodes share it."""
        if key not in self.cache:
            self.cache[key] = make()
        result: T = self.cache[key]
        return result

    def branch(
        self, condition: ir.Value, then: Callable[[], ir.Value], other: Callable[[], ir.Value]
    ) -> ir.Value:
        """An `If` with what the two functions emit; only one of them runs.

        Values of a branch are invisible outside, so shared ones must be made before.
        """
        return self.branches(condition, lambda: [then()], lambda: [other()])[0]

    def branches(
        self,
        condition: ir.Value,
        then: Callable[[], Sequence[ir.Value]],
        other: Callable[[], Sequence[ir.Value]],
    ) -> tuple[ir.Value, ...]:
        """An `If` of as many outputs as each function returns, as `branch` has it of one."""
        bodies = [self._subgraph(then, "then"), self._subgraph(other, "else")]
        made = self.ops(
            "If",
            condition,
            outputs=len(bodies[0].outputs),
            then_branch=bodies[0],
            else_branch=bodies[1],
        )
        for value, result in zip(made, bodies[0].outputs, strict=True):
            if result.dtype is not None:
                value.dtype = result.dtype
        return made

    def loop_body(self, body: Graph, captured: Mapping[Value, Value]) -> ir.Graph:
        """The body of a loop, whose `captured` inputs are values of this graph."""
        return self._lower_body(self, body, captured)

    def dim(self, expr: Any) -> ir.Value:
        """A size as an i64 scalar. Each distinct expression is computed once per graph."""
        return self._sizes.scalar(expr)

    def shape(self, dims: Sequence[Any]) -> ir.Value:
        """Sizes as a 1-D i64 tensor."""
        return self._sizes.vector(dims)

    def number(self, value: Any, dtype: torch.dtype) -> ir.Value:
        """A scalar of the dtype from a Python number or an expression over the dims."""
        return self._sizes.number(value, dtype)

    def reshape(self, value: ir.Value, old: Sequence[Dim], new: Sequence[Dim]) -> ir.Value:
        """Reshapes from one known shape to another with as little shape arithmetic as it takes."""
        return self._sizes.reshape(value, old, new)

    def expand(self, value: ir.Value, old: Sequence[Dim], new: Sequence[Dim]) -> ir.Value:
        """Broadcasts to a shape; only the dims that grow are computed."""
        return self._sizes.expand(value, old, new)

    def _initializer(self, name: str, data: torch.Tensor) -> ir.Value:
        return self._stored(name, ir.tensor_adapters.TorchTensor(data.detach(), name=name))

    def _stored(self, name: str, data: ir.TensorProtocol) -> ir.Value:
        shape = ir.Shape([int(size) for size in data.shape.numpy()])
        value = TracedValue(
            name=name, type=ir.TensorType(data.dtype), shape=shape, const_value=data
        )
        self.initializers[name] = value
        return value

    def _subgraph(self, emit: Callable[[], Sequence[ir.Value]], name: str) -> ir.Graph:
        outer, known = self.nodes, dict(self.cache)
        self.nodes = []
        results = emit()
        nodes, self.nodes = self.nodes, outer
        for key, value in self.cache.items():
            if isinstance(value, ir.Value) and value.producer() is None:
                known.setdefault(key, value)  # an initializer, which belongs to the whole graph
        self.cache = known
        return ir.Graph([], results, nodes=nodes, name=self.unique(f"{self._stem()}/{name}"))

    def _only_transposed(self, data: torch.Tensor) -> bool:
        """Whether every reader of that memory is a linear that wants it transposed."""
        if self._plain is None:
            self._plain = {
                place_of(value.data)
                for value in self.graph.constants.values()
                if value.data is not None
                and not all(node.op in LINEAR and at == 1 for node, at in value.uses)
            }
        return place_of(data) not in self._plain

    def _stem(self) -> str:
        if self.node is None or not self.node.outputs:
            return "shared"
        return self._names[self.node.outputs[0]]

    def unique(self, stem: str) -> str:
        """A name that no value has, which is then taken."""
        name = stem
        while name in self._taken:
            self._counts[stem] = self._counts.get(stem, 0) + 1
            name = f"{stem}_{self._counts[stem]}"
        self._taken.add(name)
        return name


def _tensor(value: Any, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None:
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        default = {bool: torch.bool, float: torch.float32}
        dtype = default.get(type(first), torch.int64)
    if isinstance(value, float) and math.isfinite(value) and dtype.is_floating_point:
        limit = torch.finfo(dtype).max
        value = value if abs(value) <= limit else math.copysign(math.inf, value)
    return torch.tensor(value, dtype=dtype)


@functools.cache
def signature_of(op_type: str, opset: int = OPSET) -> ir.schemas.OpSignature | None:
    """What an opset says of a standard operator; None where it has no such one."""
    try:
        return ir.schemas.OpSignature.from_op_schema(onnx.defs.get_schema(op_type, opset))
    except onnx.defs.SchemaError:
        return None


def _output_dtype(
    op_type: str,
    domain: str,
    inputs: Sequence[ir.Value | None],
    attrs: Mapping[str, Any],
    position: int = 0,
) -> ir.DataType | None:
    """An output's dtype, as attributes or the operator's type constraints bind it."""
    if "to" in attrs and op_type == "Cast":
        return ir.DataType(attrs["to"])
    if "dtype" in attrs:
        return ir.DataType(attrs["dtype"])
    if isinstance(tensor := attrs.get("value"), ir.TensorProtocol):
        return tensor.dtype
    signature = None if domain else signature_of(op_type)
    if signature is None:
        return inputs[0].dtype if inputs and inputs[0] is not None else None
    constraint = signature.outputs[min(position, len(signature.outputs) - 1)].type_constraint
    for index, value in enumerate(inputs):
        parameter = signature.inputs[min(index, len(signature.inputs) - 1)]
        if value is not None and value.dtype and parameter.type_constraint.name == constraint.name:
            return value.dtype
    if len(constraint.allowed_types) == 1:
        return next(iter(constraint.allowed_types)).dtype
    return None
