"""From a `Source`, what a command line says, to the model itself. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from typing import Any

import torch

from attngraph.errors import LoadError, UsageError
from attngraph.frontend.files.load import Loaded, load
from attngraph.frontend.files.source import Source
from attngraph.frontend.files.specs import (
    INTEGER_LIMIT,
    DimName,
    DimRange,
    InputSpec,
    dynamic_shapes,
    make_inputs,
    parse_dim,
    parse_inputs,
    ranged,
    read_npz,
)
from attngraph.frontend.interface.binding import bind, forward_signature
from attngraph.frontend.model import Model
from attngraph.inference import inference


def read_model(source: Source) -> Model:
    """Loads the model; --input and --inputs take the place of the samples it brings itself.

    Raises LoadError for the file, UsageError where the inputs don't fit it.
    """
    given = parsed(source)
    return model_of(load_source(source), source, given)


def load_source(source: Source, *, samples: bool = True) -> Loaded:
    """What the source names, loaded; a checkpoint's folder without `samples` gets none."""
    return load(
        source.path,
        factory=source.factory,
        factory_args=source.factory_args,
        trust_pickle=source.trust_pickle,
        trust_code=source.trust_code,
        task=source.task,
        samples=samples and not (source.inputs or source.npz),
    )


@dataclass(frozen=True)
class Given:
    """What --input and --dim say: of a module its inputs and dims, of a program names alone."""

    specs: tuple[InputSpec, ...]
    ranges: tuple[DimRange, ...]
    names: tuple[DimName, ...]


def parsed(source: Source) -> Given:
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
    return Given(specs, ranges, names)


def model_of(loaded: Loaded, source: Source, given: Given) -> Model:
    if loaded.program is not None:
        return _of_program(loaded, source, given)
    if given.names:
        name = given.names[0]
        raise UsageError(
            f"--dim {name.name}={name.input}:{name.axis} is for exported programs, and "
            f"{loaded.source} is a module: write the dim as {name.name}=size in --input "
            f"{name.input}, and its range as --dim {name.name}=low..high."
        )
    if not given.specs and source.npz is None:
        if given.ranges:
            shapes = ranged(loaded.dynamic_shapes, loaded.kwargs, given.ranges)
            loaded = replace(loaded, dynamic_shapes=shapes)
        return Model.of(loaded)
    by_name = dynamic_shapes(given.specs, given.ranges)
    return _with_inputs(loaded, source, given.specs, by_name)


def _of_program(loaded: Loaded, source: Source, given: Given) -> Model:
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


def _made(
    specs: tuple[InputSpec, ...], module: torch.nn.Module, signature: Signature
) -> dict[str, torch.Tensor]:
    """Samples; of smaller integers where the model looks them up in a table that has no more rows.

    It is run only if it has such a table.
    """
    tables = [each for each in module.modules() if isinstance(each, torch.nn.Embedding)]
    fewest = min((each.num_embeddings for each in tables), default=INTEGER_LIMIT)
    tensors = make_inputs(specs)
    for limit in (INTEGER_LIMIT, fewest) if fewest < INTEGER_LIMIT else ():
        tensors = make_inputs(specs, limit=limit)
        args, kwargs = bind(tensors, signature)
        try:
            with inference(module):
                module(*args, **kwargs)
        except IndexError:
            continue
        except Exception:  # the trace says what is wrong
            break
        break
    return tensors


def _with_inputs(
    loaded: Loaded,
    source: Source,
    specs: tuple[InputSpec, ...],
    by_name: Mapping[str, dict[int, torch.export.Dim] | None],
) -> Model:
    assert loaded.module is not None
    signature = forward_signature(loaded.module)
    if source.npz is not None:
        tensors = read_npz(source.npz, specs)
    else:
        tensors = _made(specs, loaded.module, signature)
    args, kwargs = bind(tensors, signature)
    shapes: dict[str, Any] | None = None
    if any(by_name.values()):
        shapes = {name: by_name.get(name) for name in tensors}
        taken = signature.parameters.values()
        variadic = [p.name for p in taken if p.kind is Parameter.VAR_POSITIONAL]
        if variadic and not shapes.keys() & signature.parameters.keys() and not kwargs:
            shapes = {variadic[0]: tuple(shapes.values())}
    return Model(loaded.module, None, args, kwargs, shapes, loaded.source, notes=loaded.notes)
