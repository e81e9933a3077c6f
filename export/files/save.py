"""Writes a model to disk whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import onnx
import onnx_ir as ir
import torch

from attngraph.errors import OutputError
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.mapped import Reader, is_large, no_holes
from attngraph.paths import data_beside, require_place, unwritable
from attngraph.scratch import scratch_folder, whole_file, whole_files

EXTERNAL_ABOVE = 16 << 20
"""Bytes of weights from which on onnxruntime maps a file faster than it parses one."""
_LARGEST = (1 << 31) - 1
"""Bytes that protobuf reads of one file."""
_SINGLE_FILE = "attngraph.single_file"
_INLINE_BELOW = 1024  # bytes; sizes and scalars stay in the model file
_ALIGNMENT = 4096
_CHUNK = 8 << 20  # bytes that are copied at once where memory order differs from the file's

# Tags of protobuf: field number, and that a length and so many bytes follow.
_GRAPH, _INITIALIZER, _RAW_DATA = (
    bytes([descriptor.fields_by_name[field].number << 3 | 2])
    for descriptor, field in (
        (onnx.ModelProto.DESCRIPTOR, "graph"),
        (onnx.GraphProto.DESCRIPTOR, "initializer"),
        (onnx.TensorProto.DESCRIPTOR, "raw_data"),
    )
)


def save(
    model: ir.Model,
    path: str | Path,
    *,
    external_above: int | None = None,
    data: Path | None = None,
) -> None:
    """Writes `path`, and beside it `<name>_data` where the weights exceed `external_above` bytes.

    Both files are written in a scratch folder beside them and renamed when complete, so that a
    failure or an interrupt leaves neither behind. Weights are streamed one by one, and no
    second copy of one is made. Where this model's were written before, under the same name, `data`
    is that file, which is moved. `external_above` is by default EXTERNAL_ABOVE, or without limit
    for a model that is to be one file.

    Raises OutputError where the place can't be written, or the weights don't fit into one file.
    """
    path = Path(path)
    require_place(path)
    weights = [
        value
        for value in model.graph.initializers.values()
        if value.const_value is not None and value.const_value.nbytes >= _INLINE_BELOW
    ]
    beside = data_beside(path)
    try:
        with whole_files(beside, path) as (place, whole):
            replaced = _placed(weights, beside.name)
            with _instead(weights, replaced):
                proto = ir.to_proto(model)
            if is_external(model, external_above):
                if data is None or not _moved(data, place):
                    with open(place, "wb") as file:
                        _write_weights(file, weights, replaced)
                whole.write_bytes(proto.SerializeToString(deterministic=True))
            else:
                with open(whole, "wb") as file:
                    _write_whole(file, proto, weights)
                    if file.tell() > _LARGEST:
                        raise OutputError(
                            f"{path} would take {file.tell() / 2**30:.1f} GiB, and one ONNX file "
                            "can hold 2: leave out --single-file. Nothing was written."
                        )
    except OSError as error:
        raise unwritable(path, error) from error


def to_session(
    model: ir.Model, target: Target, *, external_above: int = EXTERNAL_ABOVE, **options: Any
) -> Session:
    """The model in onnxruntime, without a file; large weights pass through a temporary one.

    `options` are those of `Session.open`, which also says what raises. Raises OutputError where
    there is no room for the temporary file.
    """
    if _weight_bytes(model) <= external_above:
        return Session.open(ir.to_proto(model).SerializeToString(), target, **options)
    with scratch_folder() as folder:
        path = folder / "model.onnx"
        try:
            save(model, path, external_above=external_above)
        except OutputError as error:
            raise OutputError(
                f"onnxruntime reads large weights from a temporary file: {error} "
                "TMPDIR names the folder."
            ) from error
        with no_holes() if is_large(_weight_bytes(model)) else contextlib.nullcontext():
            return Session.open(path, target, **options)


def in_one_file(model: ir.Model) -> None:
    """Has the model saved with its weights inside, however large."""
    model.meta[_SINGLE_FILE] = True


def is_external(model: ir.Model, above: int | None = None) -> bool:
    """Whether the weights go into a file of their own."""
    if above is None and model.meta.get(_SINGLE_FILE):
        return False
    return _weight_bytes(model) > (EXTERNAL_ABOVE if above is None else above)


def _moved(source: Path, place: Path) -> bool:
    """False where a file can't be moved there: to another disk, or while a session has it open."""
    try:
        os.replace(source, place)
    except OSError:
        return False
    return True


def _weight_bytes(model: ir.Model) -> int:
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _placed(weights: list[ir.Value], location: str) -> list[ir.ExternalTensor]:
    """Where each weight lies in the file beside the model: large ones on pages of their own."""
    placed, end = [], 0
    for value in weights:
        tensor = value.const_value
        assert tensor is not None
        start = end if tensor.nbytes < _ALIGNMENT else end + -end % _ALIGNMENT
        end = start + tensor.nbytes
        shape = ir.Shape([int(dim) for dim in tensor.shape.numpy()])
        placed.append(
            ir.ExternalTensor(
                location, start, tensor.nbytes, tensor.dtype, shape=shape, name=str(value.name)
            )
        )
    return placed


def _write_weights(
    file: BinaryIO, weights: list[ir.Value], placed: list[ir.ExternalTensor]
) -> None:
    reader = Reader()
    for value, place in zip(weights, placed, strict=True):
        file.seek(place.offset or 0)
        _write(file, value, reader)


def _write_whole(file: BinaryIO, model: onnx.ModelProto, weights: list[ir.Value]) -> None:
    """The model in one file: what protobuf would write, without the weights in memory twice.

    `model` says of each weight that it is in another file.
    """
    reader = Reader()
    by_name = {str(value.name): value for value in weights}
    inline = [each for each in model.graph.initializer if each.name not in by_name]
    entries = []
    for proto in model.graph.initializer:
        if proto.name not in by_name:
            continue
        value = by_name[proto.name]
        assert value.const_value is not None
        size = value.const_value.nbytes
        head = onnx.TensorProto(dims=proto.dims, data_type=proto.data_type, name=proto.name)
        text = head.SerializeToString(deterministic=True) + _RAW_DATA + _varint(size)
        entries.append((_INITIALIZER + _varint(len(text) + size) + text, value, size))
    del model.graph.initializer[:]
    model.graph.initializer.extend(inline)
    graph = model.graph.SerializeToString(deterministic=True)
    model.ClearField("graph")
    file.write(model.SerializeToString(deterministic=True))
    whole = len(graph) + sum(len(head) + size for head, _, size in entries)
    file.write(_GRAPH + _varint(whole) + graph)
    for text, value, _ in entries:
        file.write(text)
        _write(file, value, reader)


def _varint(number: int) -> bytes:
    """protobuf's form of a length: seven bits to a byte, the lowest first."""
    encoded = bytearray()
    while number >= 128:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def _write(file: BinaryIO, value: ir.Value, reader: Reader) -> None:
    tensor = value.const_value
    assert tensor is not None
    raw = getattr(tensor, "raw", None)
    if isinstance(raw, torch.Tensor) and raw.nbytes == tensor.nbytes:
        for part in _parts(raw.detach()):
            file.write(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        reader.read(raw)
    else:
        file.write(tensor.tobytes())


def _parts(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, cut along its first axis where each part is copied before it is written."""
    if data.dim() == 0 or (data.is_contiguous() and data.is_cpu):
        yield data
    else:
        rows = max(1, _CHUNK * len(data) // max(data.nbytes, 1))
        transposed = data.dim() == 2 and data.stride(0) == 1
        for start in range(0, len(data), rows):
            part = data[start : start + rows]
            # torch transposes a matrix that is whole in blocks, and a strip element by element.
            yield part.t().contiguous().t() if transposed else part


@contextlib.contextmanager
def _instead(weights: list[ir.Value], replaced: list[ir.ExternalTensor]) -> Iterator[None]:
    """The model with other tensors for its weights, for as long as it is being serialized."""
    kept = [value.const_value for value in weights]
    try:
        for value, tensor in zip(weights, replaced, strict=True):
            value.const_value = tensor
        yield
    finally:
        for value, original in zip(weights, kept, strict=True):
            value.const_value = original


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all. Raises OutputError."""
    try:
        with whole_file(path) as temporary:
            temporary.write_text(text, "utf-8")
    except OSError as error:
        raise unwritable(path, error) from error
