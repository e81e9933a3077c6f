"""A zip's directory, checked before anything in it is unpacked.

What a member takes is read from the directory at the end of the file, and held against the file
itself: every zip reader must see the same members, and none may unpack to more than the file is
large, but for the little text that TorchScript compresses.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from attngraph.errors import LoadError

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCAL = struct.Struct("<4s5H3L2H")

_MOST_MEMBERS = 200_000
_LARGEST_DIRECTORY = 64 << 20
_LARGEST_UNPACKED = 64 << 20
"""Bytes that all compressed members of a file may unpack to together."""


def read_directory(file: IO[bytes], name: str) -> list[zipfile.ZipInfo]:
    """The members of a zip; raises LoadError where the file, called `name`, is no sound zip."""
    try:
        members, problem = _read(file, _LARGEST_UNPACKED)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise LoadError(
            f"{name} starts like a zip but can't be read as one ({error}): it is cut short or "
            "damaged; fetch or save it again."
        ) from error
    if problem is not None:
        raise LoadError(
            f"{name} is no archive that torch writes: {problem}. It is damaged or was made to "
            "mislead; save the model again."
        )
    return members


def read_members(path: Path) -> list[zipfile.ZipInfo]:
    """The members of the zip at a path."""
    with path.open("rb") as file:
        return read_directory(file, str(path))


def problem_of(path: Path, largest: int) -> str | None:
    """Why a zip isn't to be unpacked: it takes more than `largest` bytes, or readers may not agree.

    Raises what zipfile does where it is none.
    """
    with path.open("rb") as file:
        return _read(file, largest)[1]


def _read(file: IO[bytes], largest: int) -> tuple[list[zipfile.ZipInfo], str | None]:
    """The members, and what is wrong with them."""
    file.seek(0, 2)
    if (problem := _end_problem(file, file.tell())) is not None:
        return [], problem
    with zipfile.ZipFile(file) as archive:
        members, start = archive.infolist(), archive.start_dir
    return members, next(_problems(file, members, start, largest), None)


def _end_problem(file: IO[bytes], size: int) -> str | None:
    """Why readers may not agree on where the directory is, or it is too large to be read."""
    if size < _END.size:
        raise zipfile.BadZipFile("the file ends before its directory")
    file.seek(size - _END.size)
    magic, _, _, _, count, length, offset, comment = _END.unpack(file.read(_END.size))
    if magic != b"PK\x05\x06":
        raise zipfile.BadZipFile("it doesn't end with its directory")
    if comment:
        return "a comment follows its directory"
    end = size - _END.size
    if end >= _LOCATOR.size:
        file.seek(end - _LOCATOR.size)
        found = _LOCATOR.unpack(file.read(_LOCATOR.size))
        if found[0] == b"PK\x06\x07":
            end = found[2]
            file.seek(min(end, size))
            magic, *_, count, length, offset = _END64.unpack(file.read(_END64.size))
            if magic != b"PK\x06\x06":
                return "its directory has no end"
    if count > _MOST_MEMBERS or length > _LARGEST_DIRECTORY:
        return f"its directory has {count} members in {length} bytes"
    if offset + length != end:
        return "bytes before its members, or behind its directory, belong to none"
    return None


def _problems(
    file: IO[bytes], members: Sequence[zipfile.ZipInfo], start: int, largest: int
) -> Iterator[str]:
    seen: set[str] = set()
    unpacked, end, before = 0, 0, ""
    for member in sorted(members, key=lambda member: member.header_offset):
        name = _short(member.filename)
        if member.filename in seen:
            yield f"{name} is in it twice"
        seen.add(member.filename)
        if _leaves(member.filename):
            yield f"{name} is no path inside it"
        if member.flag_bits & 0x1:
            yield f"{name} is encrypted"
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            yield f"{name} is compressed by method {member.compress_type}"
        if member.compress_type == zipfile.ZIP_STORED:
            if member.file_size != member.compress_size:
                yield f"{name} is stored, in {member.compress_size} bytes, as {member.file_size}"
        else:
            unpacked += member.file_size
        if member.header_offset < end:
            yield f"{name} overlaps {before}"
        end, before = _end_of(file, member), name
        if end > start:
            yield f"{name} reaches into its directory"
    if unpacked > largest:
        yield f"its compressed members unpack to {unpacked} bytes"


def _end_of(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Where a member's data ends; its local header must say the name that the directory does."""
    file.seek(member.header_offset)
    header = _LOCAL.unpack(file.read(_LOCAL.size))
    magic, flags, length, extra = header[0], header[2], int(header[-2]), int(header[-1])
    name = file.read(length)
    if magic != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"{_short(member.filename)} isn't where its directory says")
    encoding = "utf-8" if flags & 0x800 else "cp437"
    if name.decode(encoding, "replace") != member.orig_filename:
        raise zipfile.BadZipFile(f"{_short(member.filename)} has another name there")
    return member.header_offset + _LOCAL.size + length + extra + member.compress_size


def _leaves(name: str) -> bool:
    return name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/")


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:77]}...")
