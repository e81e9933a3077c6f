"""An .npz of strangers: what its directory says is checked before an array is read."""

from __future__ import annotations

import io
import re
import struct
import warnings
import zipfile
from pathlib import Path

import numpy
import pytest
import torch

from attngraph.errors import LoadError
from attngraph.frontend.files.specs import read_npz

PICKLE = b"cos\nsystem\n(S'true'\ntR."


def _npy(shape: str, kind: str = "<f4", body: bytes = b"") -> bytes:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + body


def _packed(*arrays: bytes) -> bytes:
    """An archive in which each of these is called x."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # of two of one name
        for array in arrays:
            archive.writestr("x.npy", array)
    return buffer.getvalue()


def _claiming(packed: bytes, size: int) -> bytes:
    """The archive whose directory says that x unpacks to so many bytes."""
    at = packed.rindex(b"PK\x01\x02") + 24
    return packed[:at] + struct.pack("<L", size) + packed[at + 4 :]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (_claiming(_packed(_npy("(1,)")), 3 << 30), "unpack to 3221225472 bytes"),
        (_packed(_npy("(1,)"), _npy("(2,)")), "'x.npy' is in it twice"),
        (_packed(_npy(f"({1 << 60},)")), "Unable to allocate"),
        (
            _packed(_npy("(" * 3_000 + "1" + ")" * 3_000)),
            "can't be read as an .npz of plain arrays",
        ),
        (_packed(_npy("(1,)", "|O", PICKLE)), "Object arrays cannot be loaded"),
    ],
    ids=["bomb", "twice", "shape", "deep", "pickle"],
)
def test_a_hostile_sample_is_refused(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(data)
    with pytest.raises(LoadError, match=re.escape(said)) as caught:
        read_npz(path)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("save", [numpy.savez, numpy.savez_compressed])
def test_what_numpy_writes_is_read(save: object, tmp_path: Path) -> None:
    array = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    assert callable(save)
    save(tmp_path / "x.npz", x=array, y=numpy.zeros((1 << 20,)))
    found = read_npz(tmp_path / "x.npz")
    assert torch.equal(found["x"], torch.from_numpy(array))
    assert found["y"].shape == (1 << 20,)
