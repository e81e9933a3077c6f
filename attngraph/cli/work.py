"""From what a command was given to a model, compiled or analysed. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attngraph.cli.stages import Stages
from attngraph.compiling.compiler import analyse, compile_model
from attngraph.decoding.compile import compile_decoder, of_causal_lm
from attngraph.decoding.decoder import Decoder
from attngraph.errors import LoadError, UsageError
from attngraph.export.files.staged import Staged
from attngraph.export.runtime.session import Session
from attngraph.frontend.binding import bind, forward_signature
from attngraph.frontend.cache import METADATA_KEY
from attngraph.frontend.causal_lm import is_causal_lm
from attngraph.frontend.factory import importable_cwd
from attngraph.frontend.load import Loaded, load
from attngraph.frontend.model import Model
from attngraph.frontend.source import Source
from attngraph.frontend.specs import (
    DimName,
    DimRange,
    InputSpec,
    dynamic_shapes,
    make_inputs,
    parse_dim,
    parse_inputs,
    read_npz,
)
from attngraph.optimized import Optimized
from attngraph.options import DecoderOptions, Options
from attngraph.reports.attention_weights import AttentionWeights, hidden_in_loops
from attngraph.reports.report import Report
from attngraph.verification.verify import Verification, verify_file


def optimised(source: Source, options: Options, *, stages: Stages, staged: Staged) -> Optimized:
    """The model compiled and checked, but not saved."""
    with importable_cwd():  # a user's module may import others as late as in forward
        model, seconds = _timed_model(source, stages)
        result = compile_model(model, options, staged=staged, progress=stages)
    result.report.timings = {"load": seconds, **result.report.timings}
    return result


def decoder(
    source: Source,
    options: Options,
    decoding: DecoderOptions,
    *,
    all_logits: bool,
    padding: bool,
    stages: Stages,
    staged: Staged,
) -> Decoder:
    """The model as a decoder, checked but not saved."""
    given = _parsed(source)
    with importable_cwd():
        stages("load")
        start = time.perf_counter()
        loaded = load(source.path, factory=source.factory, trust_pickle=source.trust_pickle)
        if is_causal_lm(loaded.module):
            if source.inputs or source.npz or source.dims or decoding.presents:
                raise UsageError(
                    f"{loaded.source} is a model of transformers, whose inputs --decode makes "
                    "itself: leave out --input, --inputs, --dim and --present."
                )
            model = Model(loaded.module, None, (), {}, None, loaded.source)
            model = of_causal_lm(model, all_logits=all_logits, padding=padding)
        elif all_logits or not padding:
            raise UsageError(
                f"{loaded.source} is no causal language model of transformers: it takes the inputs "
                "and returns the logits that it does; leave out --all-logits and --no-padding."
            )
        else:
            model = _model_of(loaded, source, given)
        seconds = time.perf_counter() - start
        result = compile_decoder(model, decoding, options, staged=staged, progress=stages)
    result.report.timings = {"load": seconds, **result.report.timings}
    return result


def analysed(source: Source, options: Options, *, stages: Stages) -> Report:
    """The attention sites of the model."""
    with importable_cwd():
        model, seconds = _timed_model(source, stages)
        _, report = analyse(model, options, progress=stages)
    report.timings = {"load": seconds, **report.timings}
    return report


def verified(source: Source, path: Path, options: Options, *, stages: Stages) -> Verification:
    """The file at `path` compared with the model."""
    with Session.open(path, options.device, **options.session) as opened, importable_cwd():
        stages("load")
        given = _parsed(source)
        loaded = load(source.path, factory=source.factory, trust_pickle=source.trust_pickle)
        if METADATA_KEY in opened.metadata and is_causal_lm(loaded.module):
            model = Model(loaded.module, None, (), {}, None, loaded.source)
        else:
            model = _model_of(loaded, source, given)
        return verify_file(model, path, opened, options, progress=stages)


def attended(
    source: Source,
    options: Options,
    *,
    layers: tuple[int, ...] | None,
    heads: tuple[int, ...] | None,
    stages: Stages,
) -> tuple[str, list[AttentionWeights], list[str]]:
    """(the model's name, its attentions' weights on its sample inputs, what is left out)."""
    with importable_cwd():
        model, _ = _timed_model(source, stages)
        result = compile_model(model, options, progress=stages)
        stages("attention")
        tensors = pytree.tree_leaves((model.args, dict(model.kwargs)))
        given = [leaf for leaf in tensors if isinstance(leaf, torch.Tensor)]
        views = result.attention(*given, layers=layers, heads=heads)
        return model.source, views, hidden_in_loops(result.graph)


def _timed_model(source: Source, stages: Stages) -> tuple[Model, float]:
    stages("load")
    start = time.perf_counter()
    return read_model(source), time.perf_counter() - start


def read_model(source: Source) -> Model:
    """Loads the model; --input and --inputs take the place of the samples it brings itself.

    Raises LoadError for the file, UsageError where the inputs don't fit it.
    """
    given = _parsed(source)
    loaded = load(source.path, factory=source.factory, trust_pickle=source.trust_pickle)
    return _model_of(loaded, source, given)


@dataclass(frozen=True)
class _Given:
    """What --input and --dim say: of a module its inputs and dims, of a program names alone."""

    specs: tuple[InputSpec, ...]
    ranges: tuple[DimRange, ...]
    names: tuple[DimName, ...]


def _parsed(source: Source) -> _Given:
    specs = parse_inputs(source.inputs)
    dims = [parse_dim(text) for text in source.dims]
    ranges = tuple(dim for dim in dims if isinstance(dim, DimRange))
    names = tuple(dim for dim in dims if isinstance(dim, DimName))
    if names and (ranges or specs):
        what = "--input" if specs else f"--dim {ranges[0].name} with a range"
        raise UsageError(
            f"--dim {names[0].name}={names[0].input}:{names[0].axis} names a dim of an exported "
            f"program, whose inputs and ranges are fixed: leave out {what}."
        )
    return _Given(specs, ranges, names)


def _model_of(loaded: Loaded, source: Source, given: _Given) -> Model:
    if loaded.program is not None:
        return _of_program(loaded, source, given)
    if given.names:
        name = given.names[0]
        raise UsageError(
            f"--dim {name.name}={name.input}:{name.axis} is for exported programs, and "
            f"{loaded.source} is a module: write the dim as {name.name}=size in --input "
            f"{name.input}, and its range as --dim {name.name}=low..high."
        )
    by_name = dynamic_shapes(given.specs, given.ranges)
    if not given.specs and source.npz is None:
        return Model.of(loaded)
    return _with_inputs(loaded, source, given.specs, by_name)


def _of_program(loaded: Loaded, source: Source, given: _Given) -> Model:
    if source.inputs or source.npz or (source.dims and not given.names):
        option = "--input" if source.inputs else "--inputs" if source.npz else "--dim with a range"
        raise UsageError(
            f"{loaded.source} is an exported program, whose inputs and dims are fixed: leave out "
            f"{option}, or export the model again with the dims you want. Names for its dims are "
            "given as --dim name=input:axis."
        )
    if loaded.args is None:
        raise LoadError(
            f"{loaded.source} carries no sample inputs to check the result with; save the program "
            "that torch.export.export returned, which has them."
        )
    names: dict[tuple[str, int], str] = {}
    for name in given.names:
        axis = (name.input, name.axis)
        if names.setdefault(axis, name.name) != name.name:
            raise UsageError(
                f"--dim: {name.input}:{name.axis} is named twice, {names[axis]} and {name.name}."
            )
    return replace(Model.of(loaded), dim_names=names)


def _with_inputs(
    loaded: Loaded,
    source: Source,
    specs: tuple[InputSpec, ...],
    by_name: Mapping[str, dict[int, torch.export.Dim] | None],
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
