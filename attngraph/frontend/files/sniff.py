"""Which kind of model file is it? Decided by content, not extension, and without unpickling."""

from __future__ import annotations

import os
import struct
from enum import Enum
from pathlib import Path

from attngraph.errors import LoadError
from attngraph.frontend.files.archive import read_members

_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = bytes.fromhex("8a0a6cfc9c46f9206aa850192e")
"""`torch.serialization.MAGIC_NUMBER` as every pickle protocol from 2 on writes it."""
_LFS_MAGIC = b"version https://git-lfs"


class ModelKind(Enum):
    """The container a model file is, with the name it gets in messages."""

    EXPORTED_PROGRAM = "a torch.export program"
    TORCHSCRIPT = "a TorchScript archive"
    TORCH_SAVE = "a torch.save archive"
    LEGACY_PICKLE = "a legacy torch.save pickle"
    SAFETENSORS = "a safetensors file"
    CHECKPOINT = "a checkpoint's folder"
    UNKNOWN = "of no kind attngraph reads"


def sniff(path: Path) -> ModelKind:
    """Read a few bytes, or a zip's directory, and say what the file is; a folder is a checkpoint.

    Raises LoadError for a file that is missing, empty, unreadable or a broken zip.
    """
    if os.path.isdir(path):  # false where it is out of reach
        return ModelKind.CHECKPOINT
    head, size = _head(path)
    if head.startswith(_ZIP_MAGIC):
        return _sniff_members(members(path))
    if head.startswith(b"\x80") and _LEGACY_MAGIC in head[:32]:
        return ModelKind.LEGACY_PICKLE
    if len(head) > 8 and head[8:9] == b"{":
        (header_size,) = struct.unpack("<Q", head[:8])
        if header_size > size - 8:
            raise LoadError(
                f"{path} starts like a safetensors file but is cut short: its header alone takes "
                f"{header_size} bytes and the file has {size}; fetch it again."
            )
        return ModelKind.SAFETENSORS
    if head.startswith(_LFS_MAGIC):
        raise LoadError(f"{path} is a git-lfs pointer, not the model; run `git lfs pull` first.")
    return ModelKind.UNKNOWN


def members(path: Path) -> tuple[str, ...]:
    """The names inside a zip, without the folder torch wraps them in.

    Raises LoadError where it is no sound zip, or unpacks to far more than it is.
    """
    names = [member.filename for member in read_members(path)]
    return tuple(name.partition("/")[2] if "/" in name else name for name in names)


def _head(path: Path) -> tuple[bytes, int]:
    """The first 64 bytes and the size of a file that must be there and not be empty."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
            size = file.seek(0, 2)
    except FileNotFoundError as error:
        raise LoadError(f"{path} does not exist; check the path.") from error
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror or error}.") from error
    if not head:
        raise LoadError(f"{path} is empty; save or fetch the model again.")
    return head, size


def _sniff_members(names: tuple[str, ...]) -> ModelKind:
    # TorchScript goes before torch.save: its archives hold a data.pkl too.
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return ModelKind.EXPORTED_PROGRAM
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        return ModelKind.TORCHSCRIPT
    if "data.pkl" in names:
        return ModelKind.TORCH_SAVE
    return ModelKind.UNKNOWN
