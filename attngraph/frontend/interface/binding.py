"""Match inputs given by name with the parameters of a module's forward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter
from typing import Any

import torch

from attngraph.errors import UsageError

_NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def forward_signature(module: torch.nn.Module) -> inspect.Signature:
    """The signature of `module.forward` without self; a ScriptModule's comes from its schema."""
    if not isinstance(module, torch.jit.ScriptModule):
        return inspect.signature(module.forward)
    forward: Any = module.forward
    parameters = [
        Parameter(
            argument.name,
            Parameter.KEYWORD_ONLY if argument.kwarg_only else Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else Parameter.empty,
        )
        for argument in forward.schema.arguments[1:]
    ]
    return inspect.Signature(parameters)


@contextmanager
def keywords_stated(
    module: torch.nn.Module, named: Mapping[str, Any], dynamic_shapes: Any
) -> Iterator[Any]:
    """While it lasts, what forward takes in its `**kwargs` are parameters of its signature.

    torch.export looks for the dims of these under their own names and under that of the dict at
    once, so that neither form is right. Yields the dynamic shapes by the names of the parameters.
    """
    signature = inspect.signature(module.forward)
    parameters = list(signature.parameters.values())
    given = [name for name in named if name not in signature.parameters]
    rest = parameters[-1] if parameters and parameters[-1].kind is Parameter.VAR_KEYWORD else None
    if rest is None or not given or not isinstance(dynamic_shapes, Mapping):
        yield dynamic_shapes
        return
    if unfit := [name for name in given if not name.isidentifier()]:
        raise UsageError(
            f"The input {unfit[0]!r} can't have dims of its own, as it has no name of Python's: "
            "give forward a dict of such inputs."
        )
    forward, before = module.forward, module.__dict__.get("forward")

    def stated(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    stated = functools.wraps(forward)(stated)
    own = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in given]
    setattr(stated, "__signature__", signature.replace(parameters=[*parameters[:-1], *own]))  # noqa: B010
    module.__dict__["forward"] = stated
    inner = dynamic_shapes.get(rest.name)
    others = {name: shape for name, shape in dynamic_shapes.items() if name != rest.name}
    try:
        yield {**others, **inner} if isinstance(inner, Mapping) else dynamic_shapes
    finally:
        module.__dict__.pop("forward")
        if before is not None:
            module.__dict__["forward"] = before


def bind(
    inputs: Mapping[str, torch.Tensor], signature: inspect.Signature
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """`(args, kwargs)` for a forward: by position up to the first gap, then by name.

    A forward whose only positional parameter is `*args` takes the inputs in the order given. Raises
    UsageError that lists the parameters where an input matches none of them, or a required one is
    missing.
    """
    parameters = signature.parameters
    named = [p for p in parameters.values() if p.kind in (*_NAMED, Parameter.KEYWORD_ONLY)]
    if not named and any(p.kind is Parameter.VAR_POSITIONAL for p in parameters.values()):
        return tuple(inputs.values()), {}
    known = {parameter.name for parameter in named}
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()) and not known
    if unknown := [name for name in inputs if name not in known and not takes_any]:
        raise UsageError(
            f"The model's forward has no parameter {_quoted(unknown)}; it takes "
            f"{_described(named)}."
        )
    missing = [p.name for p in named if p.default is Parameter.empty and p.name not in inputs]
    if missing:
        raise UsageError(
            f"The model's forward needs {_quoted(missing)}, which no --input gives; it takes "
            f"{_described(named)}."
        )
    args: list[torch.Tensor] = []
    for parameter in named:
        if parameter.kind not in _NAMED or parameter.name not in inputs:
            break
        args.append(inputs[parameter.name])
    positional = {parameter.name for parameter in named[: len(args)]}
    return tuple(args), {name: value for name, value in inputs.items() if name not in positional}


def _quoted(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _described(parameters: list[Parameter]) -> str:
    if not parameters:
        return "no inputs"
    return ", ".join(
        p.name if p.default is Parameter.empty else f"{p.name} (optional)" for p in parameters
    )
