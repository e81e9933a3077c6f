"""Writes a model to disk whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import onnx_ir as ir

from attngraph.errors import OutputError
from attngraph.export.session import Session
from attngraph.export.target import Target

EXTERNAL_ABOVE = 1 << 30
_INLINE_BELOW = 1024  # bytes; sizes and scalars stay in the model file
_ALIGNMENT = 4096


def save(model: ir.Model, path: str | Path, *, external_above: int = EXTERNAL_ABOVE) -> None:
    """Writes `path`, and beside it `<name>.data` where the weights exceed `external_above` bytes.

    Both files are written under temporary names in the same folder and renamed when complete, so
    that a failure or an interrupt leaves neither behind. Weights are streamed one by one.

    Raises OutputError where the place can't be written.
    """
    path = Path(path)
    if path.is_dir():
        raise OutputError(f"{path} is a folder; give the name of a file to write.")
    if not path.parent.is_dir():
        raise OutputError(f"There is no folder {path.parent}; create it or choose another path.")
    weights = [
        value
        for value in model.graph.initializers.values()
        if value.const_value is not None and value.const_value.nbytes >= _INLINE_BELOW
    ]
    try:
        with contextlib.ExitStack() as written:
            if _weight_bytes(model) > external_above:
                data = path.with_name(f"{path.name}.data")
                stored = written.enter_context(_temporary(data))
                with open(stored, "wb") as file:
                    replaced = _write_weights(file, weights, data.name)
                with _instead(weights, replaced):
                    proto = ir.to_proto(model)
            else:
                proto = ir.to_proto(model)
            whole = written.enter_context(_temporary(path))
            whole.write_bytes(proto.SerializeToString(deterministic=True))
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{path} can't be written: {reason}. Choose another path.") from error


def to_session(
    model: ir.Model, target: Target, *, external_above: int = EXTERNAL_ABOVE, **options: Any
) -> Session:
    """The model in onnxruntime, without a file; large weights pass through a temporary one.

    `options` are those of `Session.open`, which also says what raises.
    """
    if _weight_bytes(model) <= external_above:
        return Session.open(ir.to_proto(model).SerializeToString(), target, **options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        save(model, path, external_above=external_above)
        return Session.open(path, target, **options)


def _weight_bytes(model: ir.Model) -> int:
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _write_weights(
    file: BinaryIO, weights: list[ir.Value], location: str
) -> list[ir.ExternalTensor]:
    replaced = []
    for value in weights:
        tensor = value.const_value
        assert tensor is not None
        if tensor.nbytes >= _ALIGNMENT:
            file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
        offset = file.tell()
        if isinstance(tensor, ir.Tensor):
            tensor.tofile(file)
        else:
            file.write(tensor.tobytes())
        replaced.append(
            ir.ExternalTensor(
                location,
                offset,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape([int(dim) for dim in tensor.shape.numpy()]),
                name=str(value.name),
            )
        )
    return replaced


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


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A new file that takes `path`'s place when the block ends well, else is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
