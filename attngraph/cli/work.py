"""From the options of a command to a model, compiled or analysed. Imports torch."""

from __future__ import annotations

import time
from inspect import Parameter
from typing import Any

import torch

from attngraph.cli.options import Source
from attngraph.cli.stages import Stages
from attngraph.compiler import Model, analyse, compile_model
from attngraph.errors import LoadError, UsageError
from attngraph.export.target import parse_target
from attngraph.frontend.binding import bind, forward_signature
from attngraph.frontend.factory import importable_cwd
from attngraph.frontend.load import Loaded, load
from attngraph.frontend.specs import (
    InputSpec,
    dynamic_shapes,
    make_inputs,
    parse_dim,
    parse_inputs,
    read_npz,
)
from attngraph.optimized import Optimized
from attngraph.report import Report


def optimised(
    source: Source,
    *,
    target: str,
    precision: Any,
    verify: str,
    exact: bool,
    tune: bool,
    stages: Stages,
) -> Optimized:
    """The model of the options, compiled and checked but not saved."""
    parse_target(target)
    with importable_cwd():  # a user's module may import others as late as in forward
        model, seconds = _timed_model(source, stages)
        result = compile_model(
            model,
            target=target,
            precision=precision,
            verify=verify,
            exact=exact,
            tune=tune,
            progress=stages,
        )
    result.report.timings = {"load": seconds, **result.report.timings}
    return result


def analysed(source: Source, *, target: str, stages: Stages) -> Report:
    """The attention sites of the model of the options."""
    parse_target(target)
    with importable_cwd():
        model, seconds = _timed_model(source, stages)
        _, report = analyse(model, target=target, progress=stages)
    report.timings = {"load": seconds, **report.timings}
    return report


def _timed_model(source: Source, stages: Stages) -> tuple[Model, float]:
    stages("load")
    start = time.perf_counter()
    return read_model(source), time.perf_counter() - start


def read_model(source: Source) -> Model:
    """Loads the model; --input and --inputs take the place of the samples it brings itself.

    Raises LoadError for the file, UsageError where the inputs don't fit it.
    """
    specs = parse_inputs(source.inputs)
    ranges = tuple(parse_dim(text) for text in source.dims)
    by_name = dynamic_shapes(specs, ranges)
    loaded = load(source.path, factory=source.factory, trust_pickle=source.trust_pickle)
    if loaded.program is not None:
        return _of_program(loaded, source)
    if not specs and source.npz is None:
        return Model.of(loaded)
    return _with_inputs(loaded, source, specs, by_name)


def _of_program(loaded: Loaded, source: Source) -> Model:
    if source.inputs or source.npz or source.dims:
        option = "--input" if source.inputs else "--inputs" if source.npz else "--dim"
        raise UsageError(
            f"{loaded.source} is an exported program, whose inputs and dims are fixed: leave out "
            f"{option}, or export the model again with the dims you want."
        )
    if loaded.args is None:
        raise LoadError(
            f"{loaded.source} carries no sample inputs to check the result with; save the program "
            "that torch.export.export returned, which has them."
        )
    return Model.of(loaded)


def _with_inputs(
    loaded: Loaded,
    source: Source,
    specs: tuple[InputSpec, ...],
    by_name: dict[str, dict[int, torch.export.Dim] | None],
) -> Model:
    assert loaded.module is not None
    tensors = read_npz(source.npz, specs) if source.npz is not None else make_inputs(specs)
    signature = forward_signature(loaded.module)
    args, kwargs = bind(tensors, signature)
    shapes: dict[str, Any] | None = None
    if any(by_name.values()):
        shapes = {name: by_name.get(name) for name in tensors}
        taken = signature.parameters.values()
        variadic = [p.name for p in taken if p.kind is Parameter.VAR_POSITIONAL]
        if variadic and not shapes.keys() & signature.parameters.keys() and not kwargs:
            shapes = {variadic[0]: tuple(shapes.values())}
    return Model(loaded.module, None, args, kwargs, shapes, loaded.source)
