"""Keeps large weights out of memory: in mapped files, resident only while they are read.

A page of a mapped file counts as this process's memory from when it is read until it is released,
although the system could take it back at any time. Weights are read once or twice, so they are
released behind the reader. All of this does nothing where there is no /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from attngraph.scratch import scratch_folder

LARGE = 512 << 20
"""Bytes of weights from which on it pays to keep them out of memory."""

_SPILLED = 1 << 20  # bytes of a tensor that is worth a file
_PATIENCE = 64 << 20  # bytes that are read before they are released
_RELEASED = 4 << 20  # bytes of a weight that is worth a look at what is mapped
_DONTNEED = 4  # of <sys/mman.h>, on Linux
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>, in glibc
_REGION = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S{3}([sp]) \S+ \S+ (\d+)")


@dataclass(frozen=True)
class _Region:
    """Addresses that are mapped from one file."""

    start: int
    end: int
    shared: bool

    def __contains__(self, address: int) -> bool:
        return self.start <= address < self.end


def are_large(weights: Iterable[torch.Tensor]) -> bool:
    """Whether it pays to keep weights out of memory."""
    return is_large(sum(data.nbytes for data in weights))


def is_large(size: int) -> bool:
    """Whether it pays to keep so many bytes of weights out of memory."""
    return size >= LARGE


class Spill:
    """Moves large tensors that are computed from weights into unnamed temporary files.

    The model's own `weights`, and views of them, stay where they are.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._given = {_storage(data): data for data in weights}
        self._reader = Reader(self._given.values())

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        """The same numbers, mapped from a file; the tensor itself where that wouldn't help.

        It wouldn't where the tensor is small, shares its memory, or there is no room for the file.
        """
        if data.is_meta or not data.is_cpu or data.nbytes < _SPILLED:
            return data
        if _storage(data) in self._given or any(_storage(data) in item for item in _regions()):
            return data
        try:
            stored = _in_a_file(data.detach().contiguous())
        except OSError:
            return data
        self._reader.read(data.nbytes)
        return stored


class Reader:
    """Releases weights behind a reader, some tens of MiB at a time."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._weights = list(weights)
        self._read = 0

    def read(self, size: int) -> None:
        """Says that `size` more bytes were read."""
        self._read += size
        if self._read >= _PATIENCE:
            self._read = 0
            release(self._weights)


def release(weights: Iterable[torch.Tensor]) -> None:
    """Takes the pages of weights that lie in mapped files out of memory; reading brings them back.

    A private mapping that was written to is left alone: what was written would be lost.
    """
    addresses = sorted({_storage(data) for data in weights if data.is_cpu and not data.is_meta})
    regions = [
        item
        for item in _regions()
        if bisect_left(addresses, item.start) < bisect_left(addresses, item.end)
    ]
    written = _written() if any(not item.shared for item in regions) else set()
    library = ctypes.CDLL(None)
    for region in regions:
        if region.shared or region.start not in written:
            size = region.end - region.start
            library.madvise(ctypes.c_void_p(region.start), ctypes.c_size_t(size), _DONTNEED)
    if regions and hasattr(library, "malloc_trim"):  # freed weights leave holes in glibc's heap
        library.malloc_trim(0)


def release_read(data: torch.Tensor) -> None:
    """Takes a weight that was read as a whole out of memory again, where it is mapped and large."""
    if data.nbytes >= _RELEASED:
        release([data])


def release_large(module: torch.nn.Module) -> None:
    """Takes a module's mapped weights out of memory until they are read again, if that pays."""
    held = [*module.parameters(), *module.buffers()]
    weights = [data for data in held if data.layout is torch.strided]
    if are_large(weights):
        release(weights)


@contextlib.contextmanager
def no_holes() -> Iterator[None]:
    """Within it, large blocks that are freed go back to the system at once.

    glibc takes blocks of up to 32 MiB from its heap once it has seen blocks of that size freed.
    onnxruntime copies weights one by one, to widen and to pack them, and frees the originals: up to
    half as much again would stay behind in holes. Afterwards the thresholds are the largest that
    glibc chooses by itself.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(_TRIM_THRESHOLD, 64 << 20)


def _in_a_file(data: torch.Tensor) -> torch.Tensor:
    with scratch_folder() as folder:
        path = folder / "weights"
        with open(path, "wb") as file:
            file.write(data.reshape(-1).view(torch.uint8).numpy().data)
        stored = torch.from_file(str(path), shared=True, size=data.nbytes, dtype=torch.uint8)
    return stored.view(data.dtype).view(data.shape)


def _storage(data: torch.Tensor) -> int:
    return data.untyped_storage().data_ptr()


def _regions() -> Iterator[_Region]:
    """What is mapped from files."""
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:
        return
    for found in _REGION.finditer(text):
        start, end, kind, inode = found.groups()
        if inode != "0":
            yield _Region(int(start, 16), int(end, 16), kind == "s")


def _written() -> set[int]:
    """Where the regions start that have pages of their own."""
    written, start = set(), 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := _REGION.match(line):
            start = int(found[1], 16)
        elif line.startswith("Anonymous:") and line.split()[1] != "0":
            written.add(start)
    return written
