"""Read a `.pt2` file without running what it may carry.

`torch.export.load` unpickles sample inputs, and retries unsafely when the safe way fails. A clean
file is read here member by member instead: the checked JSON and raw tensors go to torch's
deserialiser directly, so that none of its pickle paths can be reached.
"""

from __future__ import annotations

import ast
import importlib
import io
import itertools
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._export.serde import schema
from torch._export.serde.serialize import ExportedProgramDeserializer, _bytes_to_dataclass
from torch.export import ExportedProgram
from torch.export.pt2_archive import PT2ArchiveReader
from torch.export.pt2_archive._package import _load_constants, _load_state_dict

from attngraph.errors import LoadError, first_line, listed
from attngraph.frontend.files.archive import read_directory, read_members
from attngraph.frontend.files.expressions import from_tree
from attngraph.frontend.files.pickles import unsupported_globals
from attngraph.frontend.files.pt2_check import parse_json, payload_problems, program_problems
from attngraph.frontend.files.sniff import members

_MOST_PROBLEMS = 1_000
_LARGEST_MEMBER = 64 << 20
_LARGEST_SAMPLE = 256 << 20


def load_program(path: Path, *, trust_pickle: bool) -> ExportedProgram:
    """The program in `path`; raises LoadError if it is damaged, or not clean and not trusted.

    Compiled code (`data/aotinductor/`) is refused even where pickles are trusted: there is no graph
    in it to optimise.
    """
    names = members(path)
    if any(name.startswith("data/aotinductor/") for name in names):
        raise LoadError(
            f"{path} holds code compiled by AOTInductor (data/aotinductor/), which attngraph never "
            "loads; save the program itself with torch.export.save."
        )
    if trust_pickle:
        return _load_trusted(path, names)
    if "serialized_exported_program.json" in names:
        raise LoadError(
            f"{path} is in the .pt2 format of torch 2.7 and older, which is read by unpickling; "
            "save it again with a newer torch, or pass --trust-pickle if you trust its author."
        )
    try:
        with _quiet():
            return _load_checked(path)
    except LoadError:
        raise
    except RecursionError as error:
        raise LoadError(f"{path} is nested too deeply to be checked.") from error
    except Exception as error:
        raise _damaged(path, error) from error


def _load_trusted(path: Path, names: tuple[str, ...]) -> ExportedProgram:
    try:
        if "models/model.json" in names:
            _import_container_types(PT2ArchiveReader(str(path)).read_string("models/model.json"))
        with path.open("rb") as file, _quiet():
            program = torch.export.load(file)
        _require_python(program)
        return program
    except Exception as error:
        raise _damaged(path, error) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses what torch says of itself.

    torch 2.13 logs its retry without weights_only with one argument too few, as a traceback; torch
    2.11 warns that weights it maps can't be written, which nothing does.
    """
    logger = logging.getLogger("torch._export.serde.serialize")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            yield
    finally:
        logger.setLevel(level)


def _import_container_types(text: str) -> None:
    """Import the modules whose types inputs and outputs name: importing registers them."""
    for module in set(re.findall(r'\\"type\\": \\"([\w.]+)\.\w+\\"', text)):
        importlib.import_module(module)


def _load_checked(path: Path) -> ExportedProgram:
    # One reader for the check and the load: two zip readers can disagree about a crafted file.
    reader = PT2ArchiveReader(str(path))
    stored = _stored(path, reader)
    name = _model_name(path, reader)
    member = f"models/{name}.json"
    text = reader.read_bytes(member)
    found = _problems(path, reader, name, stored, parse_json(text, member))
    problems = list(dict.fromkeys(itertools.islice(found, _MOST_PROBLEMS)))
    if problems:
        shown = listed(problems, 4, "; ")
        raise LoadError(
            f"{path} holds more than a graph and raw tensors: {shown}. Loading it could run code; "
            "pass --trust-pickle if you trust its author."
        )
    program = ExportedProgramDeserializer().deserialize(
        _bytes_to_dataclass(schema.ExportedProgram, text),
        _load_state_dict(reader, name),
        _load_constants(reader, name),
        _sample_inputs(reader, name),
    )
    # torch pastes guards into a function: what it gets is written from a checked syntax tree
    program._guards_code = list(map(from_tree, program._guards_code or ()))
    _require_python(program)
    return program


def _require_python(program: ExportedProgram) -> None:
    """Raises SyntaxError where the code that torch generates for its graph is no Python."""
    ast.parse(program.graph.python_code("self").src)


def _stored(path: Path, reader: PT2ArchiveReader) -> dict[str, int]:
    """The bytes of each member, where both readers see the same ones and all are bounded.

    Weights may be as large as the file. All else is read whole before it is checked.
    """
    listed = {member.filename.partition("/")[2]: member for member in read_members(path)}
    if sorted(listed) != sorted(reader.get_file_names()):
        raise LoadError(f"{path} lists other members to torch than to Python; save it again.")
    for name, member in listed.items():
        folder = name.rpartition("/")[0]
        limit = _LARGEST_SAMPLE if folder == "data/sample_inputs" else _LARGEST_MEMBER
        is_weight = folder in ("data/weights", "data/constants") and not name.endswith(".json")
        if member.file_size > limit and not is_weight:
            raise LoadError(
                f"{path} is no program of torch.export: its member {name} is {member.file_size} "
                "bytes long. Save the program again."
            )
    return {name: member.file_size for name, member in listed.items()}


def _model_name(path: Path, reader: PT2ArchiveReader) -> str:
    found = [
        name.removeprefix("models/").removesuffix(".json")
        for name in reader.get_file_names()
        if name.startswith("models/") and name.endswith(".json")
    ]
    if "model" in found:
        return "model"
    if len(found) != 1:
        raise LoadError(
            f"{path} holds {len(found)} programs ({', '.join(found) or 'none'}) and none is named "
            "'model'; save one program per file."
        )
    return found[0]


def _problems(
    path: Path,
    reader: PT2ArchiveReader,
    name: str,
    stored: Mapping[str, int],
    program: dict[str, Any],
) -> Iterator[str]:
    for folder, prefix, table in (
        ("data/weights/", "weight_", f"{name}_weights_config.json"),
        ("data/constants/", "tensor_", f"{name}_constants_config.json"),
    ):
        if f"{folder}{name}.pt" in stored:
            yield f"the pickled member {folder}{name}.pt"
        elif folder + table in stored:
            config = parse_json(reader.read_bytes(folder + table), folder + table)
            sizes = {key.removeprefix(folder): size for key, size in stored.items()}
            yield from payload_problems(config, folder + table, prefix, sizes)
    member = f"data/sample_inputs/{name}.pt"
    if member in stored:
        data = reader.read_bytes(member)
        if data.startswith(b"PK"):
            read_directory(io.BytesIO(data), f"The member {member} of {path}")
        names = unsupported_globals(data)
        if names:
            yield f"the pickled member {member}, which needs {', '.join(names)}"
    yield from program_problems(program)


def _sample_inputs(
    reader: PT2ArchiveReader, name: str
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]] | None:
    """`(args, kwargs)`, unpickled with weights only: of a tuple torch unpickles nothing."""
    member = f"data/sample_inputs/{name}.pt"
    if member not in reader.get_file_names():
        return None
    data = reader.read_bytes(member)
    if not data:
        return None
    value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(value, tuple) or len(value) != 2:
        raise LoadError(f"The sample inputs in {member} are not (args, kwargs).")
    return value


def _damaged(path: Path, error: Exception) -> LoadError:
    return LoadError(
        f"{path} can't be read as a torch.export program ({first_line(error)}); save it again with "
        f"torch {torch.__version__}."
    )
