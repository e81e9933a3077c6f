"""The op table: for each op a schema and `evaluate`, in plain torch.

ATen and custom ops are read from `torch.ops` on first use. The `attn` dialect registers references
with `@op`. Tensor arguments are a node's inputs, everything else its attributes; an attribute equal
to its default is not stored.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attngraph.errors import IRError
from attngraph.ir.dims import substitute
from attngraph.ir.graph import Graph, Node

REQUIRED = object()
_IGNORED = frozenset({"device", "layout", "pin_memory", "non_blocking", "generator"})
# A value has no strides, so ops that ask for packed ones are given them.
_PACKED = frozenset({"aten.view", "aten.view.dtype", "aten.view_as_complex"})


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument: `kind` is "tensor", "tensors" (a list) or "attr"; a `region` is a graph."""

    name: str
    kind: str
    default: Any = REQUIRED
    keyword: bool = False
    optional: bool = False
    region: bool = False

    def is_default(self, value: Any) -> bool:
        """1, 1.0 and True are three values."""
        return type(value) is type(self.default) and bool(value == self.default)


@dataclass(frozen=True, slots=True)
class OpDef:
    """An op: its name, arguments, number of outputs (None where it varies) and evaluation.

    `traits` are those that the definition states (attngraph/ir/traits.py), as ops of our own do.
    """

    name: str
    args: tuple[Arg, ...]
    outputs: int | None
    function: Callable[..., Any]
    mutates: bool = False
    doc: str = ""
    traits: tuple[Container[str], ...] = ()

    def arg(self, name: str) -> Arg:
        for arg in self.args:
            if arg.name == name:
                return arg
        raise IRError(f"{self.name} has no argument {name!r}.")

    def stored(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes that a node stores: those that aren't their defaults."""
        return {
            name: value for name, value in attrs.items() if not self.arg(name).is_default(value)
        }

    @property
    def tensor_args(self) -> tuple[Arg, ...]:
        return tuple(arg for arg in self.args if arg.kind != "attr")


_REGISTERED: dict[str, OpDef] = {}
# Namespaces that a module registers, which is imported when the first of its ops is asked for.
_DIALECTS = {"attn": "attngraph.dialect"}


def op(
    name: str, traits: Sequence[Container[str]], *, outputs: int | None = 1
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a plain-torch reference as an op; its signature is the op's schema.

    `traits` say what the op is to the analyses: see attngraph/ir/traits.py.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        hints = typing.get_type_hints(function)
        args = []
        for parameter in inspect.signature(function).parameters.values():
            hint = hints[parameter.name]
            is_list = typing.get_origin(hint) is list
            is_tensor = hint is torch.Tensor or torch.Tensor in typing.get_args(hint)
            default = parameter.default
            args.append(
                Arg(
                    parameter.name,
                    ("tensors" if is_list else "tensor") if is_tensor else "attr",
                    REQUIRED if default is inspect.Parameter.empty else default,
                    keyword=parameter.kind is inspect.Parameter.KEYWORD_ONLY,
                    optional=default is None,
                    region=hint is Graph,
                )
            )
        doc = inspect.getdoc(function) or ""
        _REGISTERED[name] = OpDef(
            name, tuple(args), outputs, function, doc=doc, traits=tuple(traits)
        )
        return function

    return register


def registered_ops() -> Mapping[str, OpDef]:
    """The ops of our own dialects, by name."""
    for module in _DIALECTS.values():
        importlib.import_module(module)
    return _REGISTERED


@functools.cache
def _torch_op(name: str) -> OpDef:
    namespace, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    function = getattr(packet, overload or "default", None)
    if not isinstance(function, torch._ops.OpOverload):
        raise IRError(f"{name} is not an operator of torch or of attngraph.")
    schema = function._schema
    args = []
    for argument in schema.arguments:
        kind = str(argument.type)
        if "Tensor[]" in kind or "List[Tensor]" in kind or "List[Optional[Tensor]]" in kind:
            kind = "tensors"
        elif kind in ("Tensor", "Optional[Tensor]"):
            kind = "tensor"
        else:
            kind = "attr"
        default = argument.default_value if argument.has_default_value() else REQUIRED
        optional = str(argument.type).startswith("Optional")
        args.append(Arg(argument.name, kind, default, argument.kwarg_only, optional))
    returns = schema.returns
    varies = any("List" in str(r.type) for r in returns)
    return OpDef(name, tuple(args), None if varies else len(returns), function, schema.is_mutable)


def op_def(name: str) -> OpDef:
    """The definition of an op. Raises IRError if nobody defines it."""
    namespace = name.split(".")[0]
    if name not in _REGISTERED and namespace in _DIALECTS:
        importlib.import_module(_DIALECTS[namespace])
    known = _REGISTERED.get(name)
    return known if known is not None else _torch_op(name)


def op_name(function: torch._ops.OpOverload) -> str:
    """`aten.add.Tensor`; the overload `default` is left out."""
    namespace, name = function._schema.name.split("::")
    overload = function._overloadname
    return f"{namespace}.{name}" + ("" if overload == "default" else f".{overload}")


def attribute(node: Node, name: str) -> Any:
    """An attribute's value, or its default where the node doesn't store it."""
    if name in node.attrs:
        return node.attrs[name]
    default = op_def(node.op).arg(name).default
    if default is REQUIRED:
        raise IRError(f"{node.op} lacks its attribute {name!r}.")
    return default


def split_inputs(
    definition: OpDef, inputs: Sequence[Any], attrs: Mapping[str, Any]
) -> dict[str, Any]:
    """Groups a node's flat inputs by argument name; list arguments come out as lists.

    Where an op has several list arguments, the attribute of the same name holds each one's length.
    """
    args = definition.tensor_args
    lists = [arg for arg in args if arg.kind == "tensors"]
    grouped: dict[str, Any] = {}
    position = 0
    for arg in args:
        if arg.kind == "tensor":
            grouped[arg.name] = inputs[position] if position < len(inputs) else None
            position += 1
            continue
        length = attrs.get(arg.name)
        if len(lists) == 1:
            length = len(inputs) - (len(args) - 1)
        if length is None and arg.optional:
            grouped[arg.name] = None
            continue
        grouped[arg.name] = list(inputs[position : position + int(length or 0)])
        position += int(length or 0)
    return grouped


def input_of(node: Node, name: str) -> Any:
    """The value (or list of values) that a node passes for a tensor argument; None if absent."""
    return named_inputs(node)[name]


def inputs_of(node: Node, *names: str) -> list[Any]:
    """As `input_of`, for several arguments."""
    given = named_inputs(node)
    return [given[name] for name in names]


def named_inputs(node: Node) -> dict[str, Any]:
    """As `input_of`, for every tensor argument of the op."""
    return split_inputs(op_def(node.op), node.inputs, node.attrs)


def flatten_call(
    definition: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The inverse of `evaluate`'s call: (flat tensor inputs, attributes without defaults)."""
    bound: dict[str, Any] = {}
    for arg, value in zip(definition.args, args, strict=False):
        bound[arg.name] = value
    bound.update(kwargs)
    inputs: list[Any] = []
    attrs: dict[str, Any] = {}
    lists = [arg for arg in definition.args if arg.kind == "tensors"]
    for arg in definition.args:
        value = bound.get(arg.name, arg.default)
        if arg.kind == "tensor":
            inputs.append(None if value is REQUIRED else value)
        elif arg.kind == "tensors":
            if value is not None and value is not REQUIRED:
                inputs.extend(value)
                if len(lists) > 1:
                    attrs[arg.name] = len(value)
        elif arg.name not in _IGNORED and value is not REQUIRED and not arg.is_default(value):
            attrs[arg.name] = value
    while inputs and inputs[-1] is None and not lists:
        inputs.pop()
    return inputs, attrs


def evaluate(node: Node, inputs: Sequence[Any], sizes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Runs a node on tensors (or fake tensors). `sizes` maps dim names to numbers.

    Returns one entry per output of the node.
    """
    attrs = {name: substitute(value, sizes) for name, value in node.attrs.items()}
    return call(op_def(node.op), inputs, attrs)


def call(definition: OpDef, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Calls an op's function with flat tensor inputs and attributes."""
    if definition.name in _PACKED and isinstance(inputs[0], torch.Tensor):
        inputs = [inputs[0].contiguous(), *inputs[1:]]
    tensors = split_inputs(definition, inputs, attrs)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for arg in definition.args:
        if arg.kind == "attr":
            value = attrs.get(arg.name, arg.default)
            if value is REQUIRED:
                raise IRError(f"{definition.name} lacks its attribute {arg.name!r}.")
        else:
            value = tensors[arg.name]
        if arg.keyword:
            if arg.name not in _IGNORED or value is not arg.default:
                keywords[arg.name] = value
        else:
            positional.append(value)
    result = definition.function(*positional, **keywords)
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)
