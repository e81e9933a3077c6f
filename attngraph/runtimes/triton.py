"""A folder of ours as a model of NVIDIA Triton: REPO/NAME/config.pbtxt, and version 1 of the file.

A model without a cache runs in Triton's onnxruntime backend. A decoder runs in its Python backend,
which generates; so does a model of static sizes on CUDA, for its kernels can be replayed as a CUDA
graph. The onnxruntime backend hands each run other memory, which a replay would not read.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir

from attngraph.errors import LoadError, OutputError, UsageError
from attngraph.export.target import Target
from attngraph.frontend.families.cache import METADATA_KEY
from attngraph.ir.ranges import Ranges
from attngraph.paths import require_file, unwritable
from attngraph.runtimes.triton_model import COUNT, FILE, IDS, MASK, TOKENS
from attngraph.scratch import scratch_folder

_TYPES = {
    onnx_ir.DataType.FLOAT: "TYPE_FP32",
    onnx_ir.DataType.FLOAT16: "TYPE_FP16",
    onnx_ir.DataType.BFLOAT16: "TYPE_BF16",
    onnx_ir.DataType.DOUBLE: "TYPE_FP64",
    onnx_ir.DataType.INT64: "TYPE_INT64",
    onnx_ir.DataType.INT32: "TYPE_INT32",
    onnx_ir.DataType.INT16: "TYPE_INT16",
    onnx_ir.DataType.INT8: "TYPE_INT8",
    onnx_ir.DataType.UINT8: "TYPE_UINT8",
    onnx_ir.DataType.BOOL: "TYPE_BOOL",
}
_BATCH = 32
"""The most rows of a batch, where the model has no limit of its own."""
_MODEL = "from attngraph.runtimes.triton_model import TritonPythonModel\n\n"
_MODEL += '__all__ = ["TritonPythonModel"]\n'


@dataclass(frozen=True)
class Port:
    """An input or output: Triton's name of its dtype, and its dims, those of any size as −1."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.dims))
        more = " optional: true" if self.optional else ""
        return f'{{ name: "{self.name}" data_type: {self.dtype} dims: [{dims}]{more} }}'


@dataclass(frozen=True)
class Served:
    """A model as Triton runs it; with `rows` of a batch the dims of ports are those of one row."""

    name: str
    backend: str
    rows: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    target: Target
    cuda_graph: bool = False

    def config(self) -> str:
        """The text of config.pbtxt."""
        kind = "KIND_GPU" if self.target.provider == "cuda" else "KIND_CPU"
        lines = [
            f'name: "{self.name}"',
            f'backend: "{self.backend}"',
            f"max_batch_size: {self.rows}",
            *(f"input {port}" for port in self.inputs),
            *(f"output {port}" for port in self.outputs),
            f"instance_group {{ count: 1 kind: {kind} }}",
        ]
        if self.rows:
            lines.append("dynamic_batching { }")
        if self.backend == "python":
            said = {"target": str(self.target), "cuda_graph": str(self.cuda_graph).lower()}
            lines += [
                f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
                for key, value in said.items()
            ]
        return "\n".join(lines) + "\n"


def served(path: Path, name: str, target: Target) -> Served:
    """How Triton runs an ONNX file. Raises UsageError for what it has no dtype for."""
    model = onnx_ir.load(path)
    if METADATA_KEY in model.metadata_props:
        given = (
            Port(IDS, "TYPE_INT64", (-1, -1)),
            Port(MASK, "TYPE_INT64", (-1, -1), optional=True),
            Port(COUNT, "TYPE_INT64", (1,)),
        )
        return Served(name, "python", 0, given, (Port(TOKENS, "TYPE_INT64", (-1, -1)),), target)
    values = [*model.graph.inputs, *model.graph.outputs]
    static = all(isinstance(dim, int) for value in values for dim in value.shape or ())
    graph = static and target.provider == "cuda"
    rows = 0 if graph else _rows(values, Ranges.of_file(model.metadata_props, path))
    inputs, outputs = (
        tuple(_port(value, bool(rows), path) for value in held)
        for held in (model.graph.inputs, model.graph.outputs)
    )
    return Served(name, "python" if graph else "onnxruntime", rows, inputs, outputs, target, graph)


def _rows(values: Sequence[onnx_ir.Value], ranges: Ranges) -> int:
    """The most rows of a batch; 0 where the first dim is not one batch in all inputs and outputs,
    or something else depends on how many rows there are."""
    first = {str(value.shape[0]) if value.shape else "" for value in values}
    if len(first) != 1 or not (name := first.pop()).isidentifier():
        return 0
    inner = {str(dim) for value in values for dim in list(value.shape or ())[1:]}
    related = any(name in map(str, each.free_symbols) for each in ranges.relations)
    if related or any(re.search(rf"\b{name}\b", dim) for dim in inner):
        return 0
    low, high = ranges.dims.get(name, (1, None))
    return min(high or _BATCH, _BATCH) if low <= 1 else 0


def _port(value: onnx_ir.Value, batched: bool, path: Path) -> Port:
    if value.shape is None or value.dtype not in _TYPES:
        raise UsageError(
            f"Triton can't be told of {value.name} in {path}: it is "
            f"{'of any rank' if value.shape is None else str(value.dtype)}."
        )
    dims = [dim if isinstance(dim, int) else -1 for dim in value.shape]
    return Port(str(value.name), _TYPES[value.dtype], tuple(dims[batched:]))


def package(source: Path, repository: Path, name: str | None, target: Target) -> Served:
    """Puts a folder that `optimize` wrote, or an ONNX file, into a model repository.

    `name` is by default the folder's, or the file's. The repository is made where there is none.
    Raises LoadError where there is no file, UsageError where there are several or a name isn't one,
    OutputError where the repository has that model already; nothing is left half written.
    """
    file = _file_of(source)
    name = name or (source.resolve().name if source.is_dir() else source.stem)
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
        raise UsageError(f"{name!r} is no name for a model: use letters, digits, _ - and dots.")
    model = served(file, name, target)
    place = repository / name
    try:
        if place.exists():
            raise OutputError(f"{place} exists; choose another --name, or remove it.")
        if not repository.absolute().parent.is_dir():
            raise OutputError(f"There is no folder {repository.parent}; create it first.")
        is_new = not repository.exists()
        repository.mkdir(exist_ok=True)
        try:
            with scratch_folder(name, repository) as scratch:
                for made, content in _files(file, model):
                    (scratch / made).parent.mkdir(parents=True, exist_ok=True)
                    if isinstance(content, Path):
                        shutil.copyfile(content, scratch / made)
                    else:
                        (scratch / made).write_text(content, "utf-8")
                whole = scratch / name
                whole.rename(place)
        except BaseException:
            if is_new:
                shutil.rmtree(repository, ignore_errors=True)
            raise
    except OSError as error:
        raise unwritable(place, error) from error
    return model


def _files(file: Path, model: Served) -> Iterator[tuple[Path, Path | str]]:
    """What the repository gets, by its path there: a text, or the file that is copied."""
    folder = Path(model.name)
    yield folder / "config.pbtxt", model.config()
    yield folder / "1" / FILE, file
    named = {
        value.const_value.location
        for value in onnx_ir.load(file).graph.initializers.values()
        if isinstance(value.const_value, onnx_ir.ExternalTensor)
    }
    for location in sorted(map(str, named)):
        yield folder / "1" / location, file.parent / location
    if model.backend == "python":
        yield folder / "1" / "model.py", _MODEL


def _file_of(source: Path) -> Path:
    if not source.is_dir():
        require_file(source)
        return source
    files = sorted(source.glob("*.onnx"))
    if not files:
        raise LoadError(f"There is no ONNX file in {source}; give what optimize wrote.")
    if len(files) > 1:
        raise UsageError(
            f"{source} holds {' and '.join(file.name for file in files)}, which Triton runs as "
            "models of their own: package each file."
        )
    return files[0]
