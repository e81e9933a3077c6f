"""Archives that lie: about where members are, how large they are, or what they are called."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable

Members = dict[str, bytes]
GIB = 1 << 30


def members_of(data: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(members: Iterable[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def named(members: Members, end: str) -> str:
    return next(name for name in members if name.endswith(end))


def deflated(size: int) -> bytes:
    """A raw deflate stream of that many zeros, made from one block that is repeated."""
    block = 16 << 20
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = packer.compress(bytes(block)) + packer.flush(zlib.Z_FULL_FLUSH)
    return piece * (size // block) + packer.flush()


def with_raw(
    members: Members, name: str, packed: bytes, size: int, *, method: int = 8, flags: int = 0
) -> bytes:
    """A zip whose member `name` is `packed` as it stands, and said to unpack to `size` bytes."""
    rest = zipped((key, data) for key, data in members.items() if key != name)
    found = _end(rest)
    count, length, offset = found
    raw = name.encode()
    size32 = min(size, 0xFFFFFFFF)
    common = struct.pack("<5H3L", 20, flags, method, 0, 0, 0, len(packed), size32)[2:]
    extra = struct.pack("<2HQ", 1, 8, size) if size > size32 else b""
    local = b"PK\x03\x04" + struct.pack("<H", 20) + common + struct.pack("<2H", len(raw), 0)
    entry = b"PK\x01\x02" + struct.pack("<2H", 20, 20) + common
    entry += struct.pack("<5H2L", len(raw), len(extra), 0, 0, 0, 0, offset) + raw + extra
    body = rest[:offset] + local + raw + packed
    directory = rest[offset : offset + length] + entry
    return body + directory + _ending(count + 1, len(directory), len(body))


def _end(data: bytes) -> tuple[int, int, int]:
    """Members, bytes and place of the directory."""
    count, length, offset = struct.unpack("<H2L", data[-12:-2])
    return count, length, offset


def _ending(count: int, length: int, offset: int) -> bytes:
    return b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, count, count, length, offset, 0)


def _entry(data: bytes, name: str) -> int:
    """The place of a member's directory entry."""
    _, _, offset = _end(data)
    return data.index(name.encode(), offset) - 46


def _patched(data: bytes, place: int, form: str, *values: int) -> bytes:
    new = struct.pack(form, *values)
    return data[:place] + new + data[place + len(new) :]


def duplicate(members: Members) -> bytes:
    name = named(members, "models/model.json")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for key, data in [*members.items(), (name, b"{}")]:
            info = zipfile.ZipInfo(key)
            archive.NameToInfo.pop(key, None)  # or zipfile warns
            archive.writestr(info, data)
    return buffer.getvalue()


def overlap(members: Members) -> bytes:
    """The first weight's data reaches over the header of the next member."""
    data = zipped(members.items())
    place = _entry(data, named(members, "weights/weight_0"))
    longer = len(members[named(members, "weights/weight_0")]) + 400
    return _patched(data, place + 20, "<2L", longer, longer)


def shared(members: Members) -> bytes:
    """Two members at one place."""
    data = zipped(members.items())
    first, second = (named(members, f"weights/weight_{n}") for n in (1, 2))
    (offset,) = struct.unpack_from("<L", data, _entry(data, first) + 42)
    return _patched(data, _entry(data, second) + 42, "<L", offset)


def larger_than_stored(members: Members) -> bytes:
    data = zipped(members.items())
    place = _entry(data, named(members, "weights/weight_0"))
    return _patched(data, place + 24, "<L", GIB)


def beyond_the_end(members: Members) -> bytes:
    data = zipped(members.items())
    return _patched(data, _entry(data, named(members, "weights/weight_0")) + 42, "<L", GIB)


def encrypted(members: Members) -> bytes:
    data = zipped(members.items())
    return _patched(data, _entry(data, named(members, "weights/weight_0")) + 8, "<H", 1)


def other_method(members: Members) -> bytes:
    name = named(members, "weights/weight_0")
    return with_raw(members, name, b"\0" * 64, GIB, method=14)


def other_local_name(members: Members) -> bytes:
    data = zipped(members.items())
    name = named(members, "weights/weight_1").encode()
    return data.replace(name, name[:-1] + b"9", 1)


def renamed(end: str, to: str) -> Callable[[Members], bytes]:
    def change(members: Members) -> bytes:
        old = named(members, end)
        return zipped((to if name == old else name, data) for name, data in members.items())

    return change


def with_member(name: str, data: bytes) -> Callable[[Members], bytes]:
    def change(members: Members) -> bytes:
        root = next(iter(members)).partition("/")[0]
        return zipped([*members.items(), (f"{root}/{name}", data)])

    return change


def bomb(end: str, size: int) -> Callable[[Members], bytes]:
    return lambda members: with_raw(members, named(members, end), deflated(size), size)


def with_count(members: Members) -> bytes:
    """A directory that says it has three hundred thousand members."""
    data = zipped(members.items())
    _, length, offset = _end(data)
    place = len(data) - 22
    end = b"PK\x06\x06" + struct.pack(
        "<Q2H2L4Q", 44, 45, 45, 0, 0, 300_000, 300_000, length, offset
    )
    locator = b"PK\x06\x07" + struct.pack("<LQL", 0, place, 1)
    return data[:place] + end + locator + _ending(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)


def with_lost_end(members: Members) -> bytes:
    data = zipped(members.items())
    locator = b"PK\x06\x07" + struct.pack("<LQL", 0, 1 << 60, 1)
    return data[:-22] + locator + data[-22:]


def with_two_ends(members: Members) -> bytes:
    """An archive of other members in the comment of the first."""
    data, other = zipped(members.items()), zipped([("x/archive_format", b"pt2")])
    return data[:-2] + struct.pack("<H", len(other)) + other


def many_members(members: Members) -> bytes:
    """Entries of three bytes each in a file of 15 megabytes."""
    entry = b"PK\x01\x02" + bytes(42) + b"a"
    entry = entry[:28] + struct.pack("<H", 1) + entry[30:]
    count = 250_000
    head = zipped(members.items())[:2000]
    directory = entry * count
    place = len(head) + len(directory)
    end = b"PK\x06\x06" + struct.pack(
        "<Q2H2L4Q", 44, 45, 45, 0, 0, count, count, len(directory), len(head)
    )
    locator = b"PK\x06\x07" + struct.pack("<LQL", 0, place, 1)
    return head + directory + end + locator + _ending(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)


ZIPS: dict[str, tuple[Callable[[Members], bytes], str]] = {
    "duplicate": (duplicate, "is in it twice"),
    "overlap": (overlap, "overlaps"),
    "shared": (shared, "overlaps"),
    "larger than stored": (larger_than_stored, "is stored, in 112 bytes, as 1073741824"),
    "beyond the end": (beyond_the_end, "can't be read"),
    "encrypted": (encrypted, "is encrypted"),
    "lzma": (other_method, "is compressed by method 14"),
    "local name": (other_local_name, "has another name there"),
    "slip": (renamed("byteorder", "archive/../../byteorder"), "is no path inside it"),
    "absolute": (renamed("byteorder", "/etc/byteorder"), "is no path inside it"),
    "backslash": (renamed("byteorder", "archive\\..\\byteorder"), "is no path inside it"),
    "json bomb": (bomb("models/model.json", 2 * GIB), "unpack to 2147483648 bytes"),
    "weight bomb": (bomb("weights/weight_0", 6 * GIB), "unpack to 6442450944 bytes"),
    "version bomb": (bomb(".data/version", GIB), "unpack to 1073741824 bytes"),
    "count": (with_count, "300000 members"),
    "lost end": (with_lost_end, "cut short or damaged"),
    "two ends": (with_two_ends, "belong to none"),
    "many members": (many_members, "250000 members"),
    "comment": (lambda m: zipped(m.items())[:-2] + b"\x04\x00abcd", "damaged"),
    "bytes before": (lambda m: b"PK\x03\x04" + bytes(60) + zipped(m.items()), "belong to none"),
    "bytes behind": (lambda m: zipped(m.items()) + bytes(60), "doesn't end with its directory"),
    "cut": (lambda m: zipped(m.items())[:-1000], "doesn't end with its directory"),
    "large member": (with_member("byteorder2", bytes(65 << 20)), "byteorder2 is 68157440 bytes"),
    "two programs": (
        lambda m: zipped(
            [
                *((n, d) for n, d in m.items() if "models/" not in n),
                ("archive/models/a.json", b"{}"),
                ("archive/models/b.json", b"{}"),
            ]
        ),
        "holds 2 programs",
    ),
}
