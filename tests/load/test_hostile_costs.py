"""A file that lies is refused in a sentence, within ten seconds and a gigabyte, whatever it holds.

Every file is loaded in a forked process of its own, which a bomb that went off would end.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.load.hostile_programs import PROGRAMS, WEIGHTS, Change
from tests.load.hostile_zips import GIB, ZIPS, Members, bomb, members_of, named, zipped
from tests.load.model_files import SOURCE, write_pt2

pytestmark = pytest.mark.machine

ROOT = Path(__file__).parents[2]


class Call:
    """Pickles as the call of a function."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def _torch_saved(value: object, **options: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def _rewritten(members: Members, end: str, change: Change) -> bytes:
    name = named(members, end)
    found = change(json.loads(members[name]))
    data = found if isinstance(found, bytes) else json.dumps(found).encode()
    return zipped((key, data if key == name else old) for key, old in members.items())


def _with_sample(members: Members, sample: bytes) -> bytes:
    name = named(members, "sample_inputs/model.pt")
    return zipped((key, sample if key == name else old) for key, old in members.items())


def _safetensors(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(64)


def _pickles() -> dict[str, tuple[bytes, str]]:
    weights = members_of(_torch_saved({"w": torch.zeros(4)}))
    imports = "is a pickle that imports"
    return {
        "system": (_torch_saved({"w": Call(os.system, "true")}), f"{imports} (posix|nt).system"),
        "eval": (_torch_saved({"w": Call(eval, "1")}), f"{imports} builtins.eval"),
        "exec, old": (
            _torch_saved({"w": Call(exec, "1")}, _use_new_zipfile_serialization=False),
            rf"{imports} (builtins\.)?exec",
        ),
        "hub": (_torch_saved({"w": Call(torch.hub.load, "a", "b")}), f"{imports} torch.hub.load"),
        "import": (
            _torch_saved({"w": Call(importlib.import_module, "this")}),
            f"{imports} importlib.import_module",
        ),
        "array of a terabyte": (_torch_saved({"w": Call(bytearray, 10**12)}), "is damaged"),
        "pickle bomb": (bomb("data.pkl", GIB)(weights), "unpack to 1073741824 bytes"),
        "weights bomb": (bomb("data/0", 6 * GIB)(weights), "unpack to 6442450944 bytes"),
        "safetensors header": (
            _safetensors(b"{" + bytes(99), 1 << 60),
            "its header alone takes 1152921504606846976",
        ),
    }


def _files(base: bytes) -> Iterator[tuple[str, bytes, str]]:
    """(name, content, what the refusal says) of every hostile file."""
    members = members_of(base)
    for name, (change, said) in PROGRAMS.items():
        yield name, _rewritten(members, "models/model.json", change), said
    for name, (change, said) in WEIGHTS.items():
        yield name, _rewritten(members, "model_weights_config.json", change), said
    for name, (pack, said) in ZIPS.items():
        yield f"zip: {name}", pack(members), said
    sample = members_of(members[named(members, "sample_inputs/model.pt")])
    for end, size in (("data.pkl", GIB), ("data/0", 6 * GIB)):
        bombed = _with_sample(members, bomb(end, size)(sample))
        yield f"sample: bomb in {end}", bombed, rf"model.pt of .* unpack to {size} bytes"
    for name, value in (("system", Call(os.system, "true")), ("array", Call(bytearray, 10**12))):
        pickled = _torch_saved(((value,), {}))
        yield f"sample: {name}", _with_sample(members, pickled), "the pickled member"
    for name, (data, said) in _pickles().items():
        yield f"pickle: {name}", data, said


NAMES = [
    *PROGRAMS,
    *WEIGHTS,
    *(f"zip: {name}" for name in ZIPS),
    "sample: bomb in data.pkl",
    "sample: bomb in data/0",
    "sample: system",
    "sample: array",
    *(f"pickle: {name}" for name in _pickles()),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the loading of each file came to, and what it should say."""
    folder = tmp_path_factory.mktemp("hostile")
    made: dict[str, Any] = {}
    exec(compile(SOURCE, "load_fixture.py", "exec"), made)
    write_pt2(made["Tied"]().eval(), folder / "base")
    paths, said = {"base": folder / "base"}, {"base": ""}
    for at, (name, data, wanted) in enumerate(_files((folder / "base").read_bytes())):
        paths[name], said[name] = folder / f"{at}", wanted
        paths[name].write_bytes(data)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    answers = subprocess.run(
        [sys.executable, "-m", "tests.load.hostile_worker"],
        input="\n".join(map(str, paths.values())) + "\n",
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=True,
    ).stdout.splitlines()
    found = {name: json.loads(line) for name, line in zip(paths, answers, strict=True)}
    return {name: {**answer, "wanted": said[name]} for name, answer in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_file_is_refused_at_no_cost(
    name: str, refusals: dict[str, dict[str, Any]]
) -> None:
    found = refusals[name]
    assert found["type"] == "LoadError", found
    assert re.search(found["wanted"], found["said"]), found
    assert len(found["said"]) < 1_000
    assert found["seconds"] < 10
    assert found["bytes"] < GIB


def test_the_file_that_they_are_made_from_loads(refusals: dict[str, dict[str, Any]]) -> None:
    assert refusals["base"]["said"] == "loaded"


def test_there_are_many_and_each_is_tried(refusals: dict[str, dict[str, Any]]) -> None:
    assert set(NAMES) == refusals.keys() - {"base"}
    assert len(NAMES) >= 60
