"""What is left of a library for one kind of GPU, and that the parts make the archive again."""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
import zipfile
from pathlib import Path

from tests.gpu.pack import fat_binaries, only_for, pack

CUBIN, PTX = 2, 1


def _entry(kind: int, architecture: int, payload: bytes) -> bytes:
    header = struct.pack("<HHIQIIII", kind, 1, 64, len(payload), 0, 0, 0, architecture)
    return header.ljust(64, b"\7") + payload


def _fat(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


OLD, OWN, TEXT = _entry(CUBIN, 80, b"o" * 40), _entry(CUBIN, 90, b"n" * 24), _entry(PTX, 90, b"p")
LIBRARY = b"code" + _fat(OLD, OWN, TEXT) + b"\x50\xed\x55\xbamore" + _fat(OLD) + b"end"
"""With bytes between that look like a beginning, and kernels that have no form for 90."""


def test_kernels_of_other_architectures_are_blank_where_there_are_own_ones() -> None:
    kept = only_for(LIBRARY, 90)
    blank = _fat(_entry(CUBIN, 80, bytes(40)), OWN, _entry(PTX, 90, b"\0"))
    assert kept == b"code" + blank + b"\x50\xed\x55\xbamore" + _fat(OLD) + b"end"
    assert [[arch for _, arch, _, _ in each] for each in fat_binaries(kept)] == [[80, 90, 90], [80]]


def test_the_parts_make_the_archive(tmp_path: Path) -> None:
    wheel = tmp_path / "onnxruntime_gpu-1-cp312.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("onnxruntime/capi/libonnxruntime_providers_cuda.so", LIBRARY)
        archive.writestr("onnxruntime/capi/libonnxruntime_providers_tensorrt.so", b"not needed")
        archive.writestr("onnxruntime/__init__.py", "")
    folder = tmp_path / "parts"
    count = pack(wheel, folder, 90, 1)
    parts = sorted(folder.glob("part-*"))
    assert len(parts) == count
    packed = b"".join(part.read_bytes() for part in parts)
    assert (folder / "sha256").read_text().strip() == hashlib.sha256(packed).hexdigest()
    assert (folder / "name").read_text().strip() == f"{wheel.stem}.tar.xz"
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        names = archive.getnames()
        library = archive.extractfile(names[0])
        assert library is not None
        assert library.read() == only_for(LIBRARY, 90)
    assert names == ["onnxruntime/capi/libonnxruntime_providers_cuda.so", "onnxruntime/__init__.py"]
