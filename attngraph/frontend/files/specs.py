"""The text of `--input` and `--dim`, and what follows from it: sample inputs and dynamic shapes.

`input_ids=int64[batch=2,seq=8]`: a dim written `name=size` is dynamic, and the same name is the
same dim everywhere; a bare number is static.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attngraph.errors import LoadError, UsageError
from attngraph.frontend.files.archive import problem_of
from attngraph.frontend.files.names import require_samples

_LARGEST_SAMPLES = 512 << 20
"""Bytes that compressed samples may unpack to."""
_INPUT_FORM = "name=dtype[dims], e.g. input_ids=int64[batch=2,seq=8] or x=float32[2,3,32,32]"
_DIM_FORM = (
    "name=low..high, name=low.. or name=auto, e.g. seq=2..2048; for an exported program "
    "name=input:axis, e.g. seq=input_ids:1"
)

_INPUT = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<dtype>\w+)\s*\[(?P<dims>[^\[\]]*)\]\s*\Z")
_DIM = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*)\s*=\s*)?(?P<size>\d{1,18})\s*\Z")
_AXIS = re.compile(
    r"\s*(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<input>[A-Za-z_]\w*)\s*:\s*(?P<axis>\d{1,18})\s*\Z"
)
_RANGE = re.compile(
    r"\s*(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<low>\d{1,18})\s*\.\.\s*(?P<high>\d{0,18})\s*\Z"
)
_AUTO = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*=\s*auto\s*\Z")

_FLOATS, _INTEGERS = ("float64", "float32", "float16", "bfloat16"), ("int64", "int32", "int16")
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_FLOATS, *_INTEGERS, "int8", "uint8", "bool")
}
INTEGER_LIMIT = 100
"""Sample integers stay below this: they are mostly token ids, and few vocabularies are smaller."""


@dataclass(frozen=True)
class SpecDim:
    """One dim of an input: static if it has no name, else dynamic with `size` as its sample."""

    size: int
    name: str | None = None


@dataclass(frozen=True)
class InputSpec:
    """One `--input`: the forward parameter it is for, its dtype and its dims."""

    name: str
    dtype: torch.dtype
    dims: tuple[SpecDim, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)


@dataclass(frozen=True)
class DimRange:
    """One `--dim`: the sizes a named dim may take, both ends included; no `high` means no limit.

    No `low` either: whatever the model takes, as of a dim that no `--dim` is about.
    """

    name: str
    low: int | None
    high: int | None


@dataclass(frozen=True)
class DimName:
    """One `--dim` of an exported program: the name of the dim that is this axis of this input."""

    name: str
    input: str
    axis: int


def parse_input(text: str) -> InputSpec:
    """Read `name=dtype[dims]`; raises UsageError with the expected form."""
    match = _INPUT.match(text)
    if match is None:
        raise UsageError(f"--input {text!r} doesn't parse; write {_INPUT_FORM}.")
    dtype = DTYPES.get(match["dtype"])
    if dtype is None:
        raise UsageError(
            f"--input {text!r}: {match['dtype']!r} is no dtype; use one of {', '.join(DTYPES)}."
        )
    items = match["dims"].split(",") if match["dims"].strip() else []
    return InputSpec(match["name"], dtype, tuple(_parse_dim(item, text) for item in items))


def parse_dim(text: str) -> DimRange | DimName:
    """Read `name=low..high`, `name=low..`, `name=auto` or `name=input:axis`.

    Raises UsageError with the expected form.
    """
    if axis := _AXIS.match(text):
        return DimName(axis["name"], axis["input"], int(axis["axis"]))
    if auto := _AUTO.match(text):
        return DimRange(auto["name"], None, None)
    match = _RANGE.match(text)
    if match is None:
        raise UsageError(f"--dim {text!r} doesn't parse; write {_DIM_FORM}.")
    low, high = int(match["low"]), int(match["high"]) if match["high"] else None
    if low < 1 or (high is not None and high <= low):
        raise UsageError(
            f"--dim {text!r} is no range of sizes: it needs 1 ≤ low < high; write {_DIM_FORM}."
        )
    return DimRange(match["name"], low, high)


def parse_inputs(texts: Iterable[str]) -> tuple[InputSpec, ...]:
    """Read every `--input`; raises UsageError too where two of them disagree."""
    specs = tuple(parse_input(text) for text in texts)
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--input {name} is given {names.count(name)} times; give it once.")
    dim_sizes(specs)
    return specs


def dim_sizes(specs: Iterable[InputSpec]) -> dict[str, int]:
    """The sample size of every named dim; raises UsageError where one name has two sizes, or 1."""
    sizes: dict[str, tuple[int, str]] = {}
    for spec in specs:
        for dim in spec.dims:
            if dim.name is None:
                continue
            if dim.size < 2:
                raise UsageError(
                    f"--input {spec.name}: {dim.name}={dim.size} can't be dynamic with a sample "
                    f"size of {dim.size}, which torch.export would bake in; write {dim.name}=2 or "
                    f"more, or {dim.size} alone for a static dim."
                )
            size, owner = sizes.setdefault(dim.name, (dim.size, spec.name))
            if size != dim.size:
                raise UsageError(
                    f"The dim {dim.name} is {size} in --input {owner} and {dim.size} in --input "
                    f"{spec.name}; the same name is the same dim, so give it one size."
                )
    return {name: size for name, (size, _) in sizes.items()}


def make_inputs(
    specs: Iterable[InputSpec], seed: int = 0, limit: int = INTEGER_LIMIT
) -> dict[str, torch.Tensor]:
    """Sample tensors by name: the same for the same specs and seed.

    Floats are normal. Integers are in [0, limit), but positions count up along the last dim, token
    types are 0, and a name with `mask` in it is all ones, as is every bool.
    """
    specs = tuple(specs)
    dim_sizes(specs)
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for spec in specs:
        try:
            made[spec.name] = _sample(spec, generator, limit)
        except (RuntimeError, MemoryError) as error:  # torch's allocator
            shape = ", ".join(map(str, spec.shape))
            raise UsageError(
                f"--input {spec.name}: a sample of shape ({shape}) doesn't fit into memory; give a "
                "smaller one."
            ) from error
    return made


def dynamic_shapes(
    specs: Sequence[InputSpec], ranges: Iterable[DimRange] = ()
) -> dict[str, dict[int, torch.export.Dim] | None]:
    """torch.export's `dynamic_shapes` by input name, one `Dim` object for each dim name.

    Raises UsageError for a range of an unknown dim, a dim with two ranges, and a sample outside its
    range.
    """
    sizes = dim_sizes(specs)
    dims = {name: torch.export.Dim(name) for name in sizes}
    seen: set[str] = set()
    for bounds in ranges:
        _check_range(bounds, sizes, seen)
        if bounds.low is not None:
            dims[bounds.name] = torch.export.Dim(bounds.name, min=bounds.low, max=bounds.high)
        seen.add(bounds.name)
    return {
        spec.name: {
            axis: dims[dim.name] for axis, dim in enumerate(spec.dims) if dim.name is not None
        }
        or None
        for spec in specs
    }


def ranged(
    shapes: object, samples: Mapping[str, Any], ranges: Iterable[DimRange]
) -> dict[str, Any] | None:
    """The dynamic shapes that a model came with, by input name, with these ranges of their dims.

    Raises UsageError as `dynamic_shapes` does, and for a dim that is derived from another.
    """
    found = dict(shapes) if isinstance(shapes, Mapping) else {}
    axes = [(n, a, d) for n, own in found.items() if isinstance(own, dict) for a, d in own.items()]
    named = [(n, a, d) for n, a, d in axes if type(d) is torch.export.Dim]
    sizes = {d.__name__: int(samples[n].shape[a]) for n, a, d in named if n in samples}
    dims: dict[str, torch.export.Dim] = {}
    for bounds in ranges:
        _check_range(bounds, sizes, set(dims))
        least = {} if bounds.low is None else {"min": bounds.low, "max": bounds.high}
        dims[bounds.name] = torch.export.Dim(bounds.name, **least)
    for _, _, dim in axes:
        root = getattr(getattr(dim, "root", None), "__name__", None)
        if root in dims:
            raise UsageError(
                f"--dim {root}: {dim.__name__} is derived from it, so it keeps its range: "
                "describe the inputs with --input."
            )
    for name, axis, dim in named:
        found[name] = {**found[name], axis: dims.get(dim.__name__, dim)}
    return found or None


def read_npz(
    path: Path, specs: Sequence[InputSpec] = (), option: str = "--inputs"
) -> dict[str, torch.Tensor]:
    """The arrays of `--inputs sample.npz`, or of another option, by name; pickled ones are refused.

    Raises LoadError for a file numpy can't read, UsageError where a spec of the same name
    disagrees.
    """
    require_samples(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            if problem := problem_of(path, _LARGEST_SAMPLES):
                raise ValueError(problem)
            tensors = {name: torch.from_numpy(archive[name]) for name in archive.files}
    except Exception as error:
        said = str(error)[:200]
        raise LoadError(
            f"{option} {path} can't be read as an .npz of plain arrays ({said}); write it with "
            "numpy.savez, one array for each input by name."
        ) from error
    for spec in specs:
        tensor = tensors.get(spec.name)
        if tensor is None:
            raise UsageError(f"--inputs {path} has no {spec.name}; it has {', '.join(tensors)}.")
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise UsageError(
                f"--inputs {path}: {spec.name} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"but --input says {spec.dtype} of shape {spec.shape}."
            )
    return tensors


def _parse_dim(item: str, text: str) -> SpecDim:
    match = _DIM.match(item)
    if match is None:
        raise UsageError(
            f"--input {text!r}: {item.strip()!r} is no dim; write a size (8) or a name and a size "
            "(seq=8)."
        )
    size = int(match["size"])
    if size < 1:
        raise UsageError(f"--input {text!r}: a dim of size {size} is empty; use 1 or more.")
    return SpecDim(size, match["name"])


def _check_range(bounds: DimRange, sizes: dict[str, int], seen: set[str]) -> None:
    size = sizes.get(bounds.name)
    if size is None:
        known = ", ".join(sizes) or "none: write a dim as name=size in --input"
        raise UsageError(
            f"--dim {bounds.name} names no dim of an input; the named dims are {known}."
        )
    if bounds.name in seen:
        raise UsageError(f"--dim {bounds.name} is given twice; give one range.")
    if bounds.low is None:
        return
    if size < bounds.low or (bounds.high is not None and size > bounds.high):
        high = "" if bounds.high is None else bounds.high
        raise UsageError(
            f"--dim {bounds.name}={bounds.low}..{high} leaves out the sample size {size} of "
            "--input; widen the range or change the sample."
        )


def _sample(spec: InputSpec, generator: torch.Generator, limit: int) -> torch.Tensor:
    if spec.dtype.is_floating_point and "mask" not in spec.name:
        return torch.randn(spec.shape, generator=generator).to(spec.dtype)
    if spec.dtype == torch.bool or "mask" in spec.name:
        return torch.ones(spec.shape, dtype=spec.dtype)
    if "position" in spec.name and spec.shape:
        return torch.arange(spec.shape[-1]).expand(spec.shape).to(spec.dtype).contiguous()
    if "token_type" in spec.name:
        return torch.zeros(spec.shape, dtype=spec.dtype)
    return torch.randint(limit, spec.shape, generator=generator).to(spec.dtype)
