"""The long tail of ATen through onnxscript's torchlib, recorded into our graph.

torchlib's functions are written against opset 18. What they emit is checked against the schemas of
our opset; the few operators whose meaning changed in between are adapted or refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import sympy
import torch
from onnxscript import OnnxFunction, evaluator, values
from onnxscript.function_libs.torch_lib import ops as _ops
from onnxscript.function_libs.torch_lib.registration import default_registry

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import Lowering
from attngraph.export.lowering.emission.values import onnx_dtype
from attngraph.export.target import OPSET
from attngraph.ir import Node, TensorType
from attngraph.ir.ops import op_def

assert _ops  # importing it fills the registry

_CHANGED = {"DFT", "GroupNormalization", "Upsample", "Scan"}
_GRID_MODES = {"bilinear": "linear", "bicubic": "cubic"}


@functools.cache
def torchlib_lowering(op: str) -> Lowering | None:
    """A lowering made of torchlib's function for an op, or None where torchlib has none."""
    name = op.replace(".", "::", 1)
    if name not in default_registry or not default_registry[name].overloads:
        return None
    function = default_registry[name].overloads[0]

    def lower(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
        args, kwargs = _arguments(ctx, node, function)
        with evaluator.default_as(_Recorder(ctx)):
            result = function(*args, **kwargs)
        results = result if isinstance(result, (list, tuple)) else [result]
        return [value if isinstance(value, ir.Value) else ctx.constant(value) for value in results]

    return lower


def _arguments(ctx: LoweringContext, node: Node, function: Any) -> tuple[list[Any], dict[str, Any]]:
    """ATen's arguments as torchlib takes them; those it doesn't know are left to their defaults."""
    parameters = function.op_signature.params
    known = {parameter.name for parameter in parameters}
    required = max((i for i, p in enumerate(parameters, 1) if p.required), default=0)
    given, args, kwargs = ctx.args(node), [], {}
    for arg in op_def(node.op).args:
        value = _convert(ctx, given[arg.name])
        if not arg.keyword:
            args.append(value)
        elif arg.name in known and value is not None:
            kwargs[arg.name] = value
    while len(args) > len(known) or (len(args) > required and args[-1] is None):
        args.pop()
    return args, kwargs


def _convert(ctx: LoweringContext, value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return onnx_dtype(value)
    if isinstance(value, sympy.Basic):
        return ctx.dim(value) if value.is_integer else ctx.number(value, torch.float32)
    if isinstance(value, (list, tuple)):
        return [_convert(ctx, item) for item in value]
    if isinstance(value, (torch.memory_format, torch.layout, torch.device)):
        return None
    return value


class _Recorder(evaluator.Evaluator):
    """Turns the operator calls of a torchlib function into nodes, with dtypes and shapes."""

    def __init__(self, ctx: LoweringContext) -> None:
        self._ctx = ctx

    def eval_op(self, op: values.Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        attrs = {name: value for name, value in kwargs.items() if value is not None}
        if op.name == "Constant":
            return self._constant(attrs)
        if op.name in _CHANGED:
            raise LoweringError(f"torchlib writes it with {op.name}-18, which changed since")
        if op.name == "GridSample" and "mode" in attrs:
            attrs["mode"] = _GRID_MODES.get(attrs["mode"], attrs["mode"])
        if op.name == "Where" and isinstance(args[0], bool):
            raise LoweringError("torchlib compares tensors by ==, which is identity")
        signature = op.op_signature
        if signature is None:
            raise LoweringError(f"torchlib uses {op.name}, which no opset defines")
        inputs, more = self._bind(signature, args, attrs)
        count = _output_count(op.name, signature, more)
        domain = "" if op.domain == "ai.onnx" else op.domain
        results = self._ctx.ops(op.name, *inputs, outputs=count, domain=domain, **more)
        _infer(results[0].producer())
        return results[0] if count == 1 else results

    def eval_function(
        self, function: OnnxFunction[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Traces through the function, with constants made tensors where it wants tensors."""
        parameters = function.op_signature.params if function.op_signature else ()
        named = dict(zip((p.name for p in parameters), args, strict=False)) | dict(kwargs)
        dtype = next((v.dtype for v in named.values() if isinstance(v, ir.Value)), None)
        for parameter in parameters:
            value = named.get(parameter.name)
            is_input = isinstance(parameter, ir.schemas.Parameter)
            if is_input and isinstance(value, (bool, int, float, list)):
                single = dtype if isinstance(value, float) else None
                named[parameter.name] = self._tensor(value, single)
        return function.function(**named)

    def _bind(
        self, signature: ir.schemas.OpSignature, args: Sequence[Any], attrs: Mapping[str, Any]
    ) -> tuple[list[ir.Value | None], dict[str, Any]]:
        """Splits a call into inputs, numbers made tensors of the right dtype, and attributes."""
        rest, more = list(args), dict(attrs)
        operands: list[tuple[Any, ir.schemas.Parameter]] = []
        for parameter in signature.params:
            if isinstance(parameter, ir.schemas.Parameter):
                if parameter.variadic:
                    operands += [(value, parameter) for value in rest]
                    rest = []
                elif rest:
                    operands.append((rest.pop(0), parameter))
                else:
                    operands.append((more.pop(parameter.name, None), parameter))
            elif rest:
                more[parameter.name] = rest.pop(0)
        types: dict[str, ir.DataType] = {}
        for value, parameter in operands:
            if isinstance(value, ir.Value) and value.dtype is not None:
                types.setdefault(parameter.type_constraint.name, value.dtype)
        inputs = []
        for value, parameter in operands:
            dtype = types.get(parameter.type_constraint.name)
            allowed = parameter.type_constraint.allowed_types
            if dtype is None and len(allowed) == 1:
                dtype = next(iter(allowed)).dtype
            inputs.append(self._tensor(value, dtype))
        return inputs, {name: _attribute(signature, name, value) for name, value in more.items()}

    def _tensor(self, value: Any, dtype: ir.DataType | None) -> ir.Value | None:
        if value is None or isinstance(value, ir.Value):
            return value
        if isinstance(value, (list, tuple)) and any(isinstance(v, ir.Value) for v in value):
            pieces = [
                self._ctx.op("Reshape", v, self._ctx.constant([-1]))
                if isinstance(v, ir.Value)
                else self._tensor([v], dtype)
                for v in value
            ]
            return self._ctx.op("Concat", *pieces, axis=0)
        if isinstance(value, ir.TensorProtocol):
            return self._ctx.constant(torch.from_numpy(value.numpy().copy()))
        if isinstance(value, onnx.TensorProto):
            return self._ctx.constant(torch.from_numpy(onnx.numpy_helper.to_array(value).copy()))
        wanted = self._float(value) if dtype is None else ir.tensor_adapters.to_torch_dtype(dtype)
        return self._ctx.constant(value, wanted)

    def _float(self, value: Any) -> torch.dtype | None:
        """A number that torchlib casts where it is used is as exact as the op's own results."""
        node = self._ctx.node
        wide = node is not None and any(
            isinstance(output.type, TensorType) and output.dtype == torch.float64
            for output in node.outputs
        )
        return torch.float64 if wide and isinstance(value, float) else None

    def _constant(self, attrs: Mapping[str, Any]) -> ir.Value:
        ((name, value),) = attrs.items()
        value = value.value if isinstance(value, ir.Attr) else value
        dtypes = {
            "value_int": torch.int64,
            "value_ints": torch.int64,
            "value_float": torch.float32,
            "value_floats": torch.float32,
        }
        if name in dtypes:
            whole = list(value) if name.endswith("s") else value
            return self._ctx.constant(whole, dtypes[name])
        result = self._tensor(value, None)
        if result is None:
            raise LoweringError("torchlib writes a constant without a value")
        return result


def _attribute(signature: ir.schemas.OpSignature, name: str, value: Any) -> Any:
    """The attribute's plain value; a float attribute may be given as an int."""
    value = value.value if isinstance(value, ir.Attr) else value
    parameter = signature.params_map.get(name)
    if isinstance(parameter, ir.schemas.AttributeParameter) and isinstance(value, int):
        return float(value) if parameter.type == ir.AttributeType.FLOAT else value
    return value


def _output_count(name: str, signature: ir.schemas.OpSignature, attrs: Mapping[str, Any]) -> int:
    if name == "Split":
        if "num_outputs" not in attrs:
            raise LoweringError("torchlib splits into a number of parts that isn't known")
        return int(attrs["num_outputs"])
    if name == "BatchNormalization" and not attrs.get("training_mode"):
        return 1
    return len(signature.outputs)


_SCHEMAS: Callable[[str], Any] = functools.cache(lambda name: onnx.defs.get_schema(name, OPSET))


def _infer(node: ir.Node | None) -> None:
    """Gives a node's outputs the dtypes and shapes that ONNX infers, for torchlib to look at."""
    if node is None or node.domain or any(v is not None and v.type is None for v in node.inputs):
        return
    read = [value for value in node.inputs if value is not None]
    types = {str(v.name): ir.serde.serialize_value(v).type for v in read}
    data = {
        str(v.name): ir.serde.serialize_tensor(v.const_value)
        for v in read
        if v.const_value is not None and v.const_value.size <= 64
    }
    try:
        inferred = onnx.shape_inference.infer_node_outputs(
            _SCHEMAS(node.op_type),
            ir.serde.serialize_node(node),
            types,
            data,
            opset_imports=[onnx.helper.make_opsetid("", OPSET)],
            ir_version=10,
        )
    except onnx.shape_inference.InferenceError as error:
        raise LoweringError(
            f"torchlib writes it with an invalid {node.op_type}: {error}"
        ) from error
    for value in node.outputs:
        if str(value.name) in inferred:
            proto = inferred[str(value.name)]
            value.type = ir.serde.deserialize_type_proto_for_type(proto)
            value.shape = ir.serde.deserialize_type_proto_for_shape(proto)
