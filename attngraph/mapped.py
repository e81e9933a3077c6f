"""Keeps large weights out of memory: in mapped files, resident only while they are read.

A page of a mapped file counts as this process's memory from when it is read until it is released,
although the system could take it back at any time. Weights are read once or twice, so they are
released behind the reader. All of this does nothing where there is no /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy
import torch

from attngraph.scratch import scratch_folder

LARGE = 512 << 20
"""Bytes of weights from which on it pays to keep them out of memory."""

_SPILLED = 1 << 20  # bytes of a tensor that is worth a file
_PATIENCE = 64 << 20  # bytes that are read before they are released
_RELEASED = 4 << 20  # bytes of a weight that is worth a look at what is mapped
_DONTNEED = 4  # of <sys/mman.h>, on Linux
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>, in glibc
_REGION = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+)")
_HELD = numpy.uint64(0b11 << 62)  # of a page's number: in memory, or swapped out
_BACKED = numpy.uint64(1 << 61)  # lies in a file, or is shared
_LOOK = 256 << 20  # bytes whose pages are looked at in one go


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
        self._moved = 0

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        """The numbers mapped from a file; the tensor itself where that wouldn't help.

        It wouldn't where the tensor is small, shares its memory, or there is no room for the file.
        """
        if data.is_meta or not data.is_cpu or data.nbytes < _SPILLED:
            return data
        if _storage(data) in self._given or _is_mapped(_storage(data)):
            return data
        try:
            stored = _in_a_file(data.detach().contiguous())
        except OSError:
            return data
        self._moved += data.nbytes
        if self._moved >= _PATIENCE:  # which of the weights were read for it isn't known
            self._moved = 0
            release(self._given.values())
        return stored


class Reader:
    """Releases weights behind a reader, some tens of MiB at a time."""

    def __init__(self) -> None:
        self._read: list[torch.Tensor] = []
        self._size = 0

    def read(self, weight: torch.Tensor) -> None:
        """Says that a weight was read."""
        self._read.append(weight)
        self._size += weight.nbytes
        if self._size >= _PATIENCE:
            release(self._read)
            self._read, self._size = [], 0


def release(weights: Iterable[torch.Tensor]) -> None:
    """Takes the pages of weights that lie in mapped files out of memory; reading brings them back.

    Weights in other memory are left alone, and so is a private mapping that was written to: what
    was written would be lost.
    """
    try:
        pages = os.open("/proc/self/pagemap", os.O_RDONLY)
    except OSError:
        return
    library, released = ctypes.CDLL(None), False
    try:
        for start, end in _spans(weights):
            if _is_backed(pages, start, end):
                size = end - start
                library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _DONTNEED)
                released = True
    finally:
        os.close(pages)
    if released and hasattr(library, "malloc_trim"):  # freed weights leave holes in glibc's heap
        library.malloc_trim(0)


def _spans(weights: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """The addresses of weights, in whole pages, sorted and joined."""
    spans: list[tuple[int, int]] = []
    for data in weights:
        if not data.is_cpu or data.is_meta or not data.numel():
            continue
        strides = zip(data.shape, data.stride(), strict=True)
        items = 1 + sum((size - 1) * stride for size, stride in strides)
        start = data.data_ptr()
        end = start + items * data.element_size()
        spans.append((start - start % mmap.PAGESIZE, end + -end % mmap.PAGESIZE))
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _is_backed(pages: int, start: int, end: int) -> bool:
    """Whether all that the system holds of these pages lies in files (or is shared) as well.

    `pages` is /proc/self/pagemap, which has a number of 64 bits for each page. /proc/self/smaps
    says the same, and looks at every page of the process for it.
    """
    for part in range(start, end, _LOOK):
        count = (min(part + _LOOK, end) - part) // mmap.PAGESIZE
        held = os.pread(pages, 8 * count, 8 * (part // mmap.PAGESIZE))
        if len(held) < 8 * count:
            return False
        entries = numpy.frombuffer(held, numpy.uint64)
        if bool(((entries & _HELD != 0) & (entries & _BACKED == 0)).any()):
            return False
    return True


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


def _is_mapped(address: int) -> bool:
    """Whether an address is mapped from a file."""
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:
        return False
    regions = (found.groups() for found in _REGION.finditer(text))
    return any(
        int(start, 16) <= address < int(end, 16) for start, end, inode in regions if inode != "0"
    )
