"""onnxruntime-gpu's wheel for one kind of GPU, in few parts.

    python -m tests.gpu.pack WHEEL FOLDER [--sm 90] [--mib 50]

The wheel holds every kernel once for each architecture. What a lent machine doesn't run is filled
with zeros, which compress to nothing; the kernels of its own architecture stay as they were
released, and so does all the code around them. FOLDER gets part-00 … of at most `--mib` MiB, `name`
and `sha256` of the archive that they make, and `commit`; tests/gpu/lent.sh unpacks them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from bench.machine import describe

_MAGIC = struct.pack("<I", 0xBA55ED50)
"""What a fat binary of CUDA begins with: magic, version, size of the header, size of the rest."""
_HEAD, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIII")
"""Of an entry: kind, version, size of its header, of its payload, …, architecture."""
_CUBIN = 2
_LEFT_OUT = ("capi/libonnxruntime.so", "tensorrt", "/tools/", "/transformers/models/")
"""The library for C programs, another provider, and what converts and quantizes models."""
_FILTERS = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 28},
]


def only_for(library: bytes, architecture: int) -> bytes:
    """The library with the kernels of other architectures blank, where this one has its own."""
    kept = bytearray(library)
    for entries in fat_binaries(library):
        own = [(_CUBIN, architecture) == (kind, arch) for kind, arch, _, _ in entries]
        if not any(own):
            continue
        for mine, (_, _, start, size) in zip(own, entries, strict=True):
            if not mine:
                kept[start : start + size] = bytes(size)
    return bytes(kept)


def fat_binaries(library: bytes) -> Iterator[list[tuple[int, int, int, int]]]:
    """Of each fat binary, (kind, architecture, start, size) of what it holds."""
    at = library.find(_MAGIC)
    while at >= 0:
        _, version, header, size = _HEAD.unpack_from(library, at)
        end = at + header + size
        if (version, header) != (1, _HEAD.size) or end > len(library):
            at = library.find(_MAGIC, at + 1)
            continue
        entries, place = [], at + header
        while place < end:
            kind, _, head, payload, _, _, _, arch = _ENTRY.unpack_from(library, place)
            entries.append((kind, arch, place + head, payload))
            place += head + payload
        yield entries
        at = library.find(_MAGIC, end)


def pack(wheel: Path, folder: Path, architecture: int, mib: int) -> int:
    """Writes the parts; how many there are."""
    unpacked = io.BytesIO()
    with zipfile.ZipFile(wheel) as files, tarfile.open(fileobj=unpacked, mode="w") as archive:
        for name in files.namelist():
            if any(part in name for part in _LEFT_OUT) or name.endswith("/"):
                continue
            content = files.read(name)
            if "providers_cuda" in name:
                content = only_for(content, architecture)
            told = tarfile.TarInfo(name)
            told.size, told.mode = len(content), 0o755
            archive.addfile(told, io.BytesIO(content))
    packed = lzma.compress(unpacked.getvalue(), filters=_FILTERS)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("part-*"):
        old.unlink()
    parts = [packed[at : at + (mib << 20)] for at in range(0, len(packed), mib << 20)]
    for number, part in enumerate(parts):
        (folder / f"part-{number:02}").write_bytes(part)
    (folder / "name").write_text(f"{wheel.stem}.tar.xz\n")
    (folder / "sha256").write_text(f"{hashlib.sha256(packed).hexdigest()}\n")
    (folder / "commit").write_text(f"{describe()['commit']}\n")
    return len(parts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sm", type=int, default=90, help="the GPU's architecture")
    parser.add_argument("--mib", type=int, default=50, help="the largest part")
    options = parser.parse_args(arguments)
    print(pack(options.wheel, options.folder, options.sm, options.mib), "parts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
