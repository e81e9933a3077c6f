"""Read a `.pt2` file without running what it may carry.

`torch.export.load` unpickles sample inputs, and retries unsafely when the safe way fails. A clean
file is read here member by member instead: the checked JSON and raw tensors go to torch's
deserialiser directly, so that none of its pickle paths can be reached.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._export.serde import schema
from torch._export.serde.serialize import ExportedProgramDeserializer, _bytes_to_dataclass
from torch.export import ExportedProgram
from torch.export.pt2_archive import PT2ArchiveReader
from torch.export.pt2_archive._package import _load_constants, _load_state_dict

from attngraph.errors import LoadError
from attngraph.frontend.pickles import unsupported_globals
from attngraph.frontend.pt2_check import payload_problems, program_problems
from attngraph.frontend.sniff import members

_SHOWN = 4


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
            return torch.export.load(file)
    except Exception as error:
        raise _damaged(path, error) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says of its own doings.

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
    name = _model_name(path, reader)
    text = reader.read_bytes(f"models/{name}.json")
    problems = list(dict.fromkeys(_problems(reader, name, json.loads(text.decode()))))
    if problems:
        shown = "; ".join(problems[:_SHOWN])
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise LoadError(
            f"{path} holds more than a graph and raw tensors: {shown}{more}. Loading it could run "
            "code; pass --trust-pickle if you trust its author."
        )
    return ExportedProgramDeserializer().deserialize(
        _bytes_to_dataclass(schema.ExportedProgram, text),
        _load_state_dict(reader, name),
        _load_constants(reader, name),
        _sample_inputs(reader, name),
    )


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


def _problems(reader: PT2ArchiveReader, name: str, program: dict[str, Any]) -> Iterator[str]:
    present = set(reader.get_file_names())
    for folder, prefix, table in (
        ("data/weights/", "weight_", f"{name}_weights_config.json"),
        ("data/constants/", "tensor_", f"{name}_constants_config.json"),
    ):
        if f"{folder}{name}.pt" in present:
            yield f"the pickled member {folder}{name}.pt"
        elif folder + table in present:
            config = json.loads(reader.read_string(folder + table))
            yield from payload_problems(config, folder + table, prefix)
    member = f"data/sample_inputs/{name}.pt"
    if member in present:
        names = unsupported_globals(reader.read_bytes(member))
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
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return LoadError(
        f"{path} can't be read as a torch.export program ({reason[0][:200]}); save it again with "
        f"torch {torch.__version__}."
    )
