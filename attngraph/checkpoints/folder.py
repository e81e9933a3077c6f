"""A checkpoint's folder, checked without torch: its config, and the files of its weights.

The folder may come from a stranger. Nothing in it is run, and no file outside of it is read: a name
that leads out, by `..` or by a link, is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, TypeVar

from attngraph.checkpoints.scheme import Scheme, scheme_of
from attngraph.errors import LoadError

T = TypeVar("T")
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
MODULES = "modules.json"
"""The list of sentence-transformers: the model, and what makes embeddings of its tokens."""
_TRANSFORMERS = ("Transformer", "MLMTransformer")
VOCABULARY, LABELS = "vocab_size", "num_labels"
"""Sizes in a config that an adapter may have changed."""
_BELOW = (f"*/{CONFIG}", f"snapshots/*/{CONFIG}")
"""Where a checkpoint may lie in the folder that is given: as the hub's cache has it, say."""
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_OF_MODELS = (*_SAFETENSORS, *_PICKLES)
_NAMED = "transformers_weights"
"""A key of config.json: the name of the file with the weights, where it is another one."""
_SHOWN = 5
_COUNT = re.compile(r"(?:num|n|encoder|decoder)_(?:\w+_)?(layer|label)s?")
_LEAST_OF = {"layer": 64, "label": 1}
"""Bytes that a file takes for one: a layer has a weight, which has a name, a dtype and a shape
there; a label has a row."""
_SLACK = 1 << 16


@dataclass(frozen=True)
class Adapter:
    """What peft saved to be merged into a base: its folder, settings and file of weights."""

    path: Path
    settings: Mapping[str, Any]
    weights: Path


@dataclass(frozen=True)
class Folder:
    """A checkpoint's folder: what config.json says, and which files hold the weights.

    `root` is the folder that was given, and `path` that of the model. `listed` are the names of the
    weights that an index promises, by file. With an `adapter` the folder is that of its base, of
    whose config it may have changed `sizes`. `scheme` is how the weights are quantized, if they
    are.
    """

    root: Path
    path: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]
    listed: Mapping[str, Path] = field(default_factory=dict)
    adapter: Adapter | None = None
    scheme: Scheme | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, *, trust_pickle: bool = False, trust_code: bool = False) -> Folder:
        """Raises LoadError where the folder lacks what is needed, or asks for more trust."""
        root, adapter = path, _adapter(model_in(path), trust_pickle=trust_pickle)
        path = folders_of(path)[0]
        config = read_config(path)
        scheme = scheme_of(path, config, lambda name: read_json(path, name))
        if not trust_code:
            _refuse_code(path, config)
        weights, listed = weight_files(path, config, trust_pickle=trust_pickle)
        _require_counts(path / CONFIG, config, sum(file.stat().st_size for file in weights))
        return cls(root, path, config, weights, listed, adapter, scheme)

    @property
    def architecture(self) -> str | None:
        """The name of the class that was saved or adapted, if config.json or an adapter says it."""
        told = {} if self.adapter is None else self.adapter.settings.get("auto_mapping") or {}
        if str(told.get("parent_library")).startswith("transformers."):
            return str(told.get("base_model_class"))
        names = self.config.get("architectures")
        first = names[0] if isinstance(names, list) and names else names
        return first if isinstance(first, str) and first else None

    @property
    def notes(self) -> list[str]:
        """What is to be told of the folder: that it names more classes than are read."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or len(names) < 2:
            return []
        others = ", ".join(map(str, names[1:]))
        return [f"{CONFIG} names {names[0]} and {others}: this is the first of them."]

    def optional(self, name: str) -> Mapping[str, Any]:
        """What a JSON file of the folder holds; nothing where there is no such file."""
        return read_json(self.path, name) or {}


def read_json(path: Path, name: str) -> Mapping[str, Any] | None:
    """What a JSON file of a folder holds, None where it has none. Raises LoadError."""
    file = within(path, name)
    return _read_json(file) if file.is_file() else None


def read_list(file: Path) -> list[Any]:
    """The list in a JSON file. Raises LoadError."""
    return _read(file, list, "array")


def entries_of(root: Path) -> list[Mapping[str, Any]]:
    """What modules.json lists, nothing where there is none. Raises LoadError."""
    file = within(root, MODULES)
    return [each for each in read_list(file) if isinstance(each, dict)] if file.is_file() else []


def kind_of(entry: Mapping[str, Any]) -> str:
    """The class of an entry of modules.json, if it is one of sentence-transformers."""
    package, _, name = str(entry.get("type")).partition(".")
    return name.rpartition(".")[2] if package == "sentence_transformers" else ""


def is_model(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of modules.json is a model of transformers."""
    return kind_of(entry) in _TRANSFORMERS


def model_in(root: Path) -> Path:
    """Where the model of a folder lies: in the one that modules.json names, or in itself."""
    first = next(iter(entries_of(root)), {})
    name = first.get("path")
    if not (is_model(first) and isinstance(name, str) and name):
        return root
    return within(root, name)


def folders_of(path: Path) -> tuple[Path, ...]:
    """The folders that a checkpoint is in: its own alone, or the base of an adapter and its own.

    Raises LoadError where the base is not on this machine, and where a model lies beside an adapter
    of another one.
    """
    path = model_in(path)
    file = within(path, ADAPTER_CONFIG)
    if not file.is_file():
        return (path,)
    settings = _read_json(file)
    name = settings.get("base_model_name_or_path")
    base = _base(path, name, settings.get("revision"))
    if within(path, CONFIG).is_file() and any((path / each).is_file() for each in _OF_MODELS):
        if name and (base is None or base.resolve() != path.resolve()):
            raise LoadError(
                f"{path} holds a model and an adapter of {name!r}, so which one is meant isn't "
                f"known: move {ADAPTER_CONFIG} and the adapter's weights, or the model, elsewhere."
            )
        return (path,)
    if base is None:
        raise LoadError(
            f"{path} is an adapter of {name!r}, which is no folder here: write that of its base "
            f"into {ADAPTER_CONFIG} as base_model_name_or_path."
        )
    return base, path


def require_tokenizer(path: Path, runtime: str) -> None:
    """Raises LoadError where a checkpoint has no file, itself or in its base, that the runtime
    reads a tokenizer from."""
    names = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
    if not any((each / name).is_file() for each in folders_of(path) for name in names):
        raise LoadError(
            f"{path} has no tokenizer, which --for {runtime} is to write beside the file: put its "
            f"tokenizer.json and tokenizer_config.json there, or {{}} as tokenizer.json where "
            "your program gives ids and takes them."
        )


def _base(path: Path, name: Any, revision: Any) -> Path | None:
    """The folder of an adapter's base, here or in the hub's cache; nothing is fetched."""
    if not isinstance(name, str) or not name:
        return None
    for place in (Path(name), path / name):
        if place.is_dir():
            return place
    try:
        hub: Any = import_module("huggingface_hub")
        return Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # not installed, no such name, not in the cache
        return None


def _adapter(path: Path, *, trust_pickle: bool) -> Adapter | None:
    file = within(path, ADAPTER_CONFIG)
    if not file.is_file():
        return None
    found = next((item for n in _ADAPTERS if (item := within(path, n)).is_file()), None)
    if found is None:
        raise LoadError(f"{path} has no weights of its adapter: there is no {_ADAPTERS[0]} in it.")
    if found.suffix == ".bin" and not trust_pickle:
        raise pickled(path, found)
    return Adapter(path, _read_json(file), found)


def pickled(path: Path, file: Path) -> LoadError:
    """The error for weights in a pickle that nobody has said to trust."""
    return LoadError(
        f"{path} has its weights in {file.name}, a pickle, which can run its author's code: pass "
        "--trust-pickle (trust_pickle=True) if you trust the author, or save the model again with "
        "save_pretrained, which writes safetensors."
    )


def read_config(path: Path) -> Mapping[str, Any]:
    """What config.json says. Raises LoadError where there is none, or it can't be read."""
    file = within(path, CONFIG)
    if not file.is_file():
        inner = sorted(each for how in _BELOW for each in path.glob(how))
        meant = f" (such as {inner[0].parent})" if inner else ""
        raise LoadError(
            f"{path} has no {CONFIG}, so it is no checkpoint; give the folder that save_pretrained "
            f"wrote{meant}, or a model file."
        )
    return _read_json(file)


def weight_files(
    path: Path, config: Mapping[str, Any], *, trust_pickle: bool = False
) -> tuple[tuple[Path, ...], dict[str, Path]]:
    """The files of the weights, and what an index says is in each. Raises LoadError."""
    named = config.get(_NAMED)
    names = (*((named,) if isinstance(named, str) else ()), *_SAFETENSORS)
    found = next((file for name in names if (file := within(path, name)).is_file()), None)
    if found is None:
        found = next((file for n in _PICKLES if (file := within(path, n)).is_file()), None)
        if found is None:
            raise LoadError(
                f"{path} has no weights: there is no {_SAFETENSORS[0]}, {_SAFETENSORS[1]} or "
                f"{_PICKLES[0]} in it; it holds {_contents(path)}."
            )
        if not trust_pickle:
            raise pickled(path, found)
    if found.suffix != ".json":
        return (found,), {}
    return _shards(path, found)


def within(path: Path, name: str) -> Path:
    """A file of the folder. Raises LoadError where the name, or a link, leads out of it.

    The hub's own cache keeps files as links to `blobs` beside its `snapshots`; those are its own.
    """
    pure = PurePath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\\" in name or "\0" in name:
        raise LoadError(f"{path} names the file {name!r}, which is not inside of it.")
    file = path / name
    try:
        real, home = file.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # a circle of links
        raise LoadError(f"{file} can't be read: it is a link to itself.") from error
    cached = home.parent.name == "snapshots" and real.is_relative_to(home.parents[1] / "blobs")
    if not real.is_relative_to(home) and not cached:
        raise LoadError(
            f"{file} is a link to {real}, outside of the folder; put the file itself there."
        )
    return file


def _shards(path: Path, index: Path) -> tuple[tuple[Path, ...], dict[str, Path]]:
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise LoadError(f"{index} has no weight_map that says where each weight is.")
    listed: dict[str, Path] = {}
    for weight, name in places.items():
        if not isinstance(name, str):
            raise LoadError(f"{index} names no file for {weight}.")
        listed[weight] = within(path, name)
    files = tuple(sorted(set(listed.values())))
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise LoadError(
            f"{index} names the shard {missing[0]}{more}, which {path} lacks; fetch it as well."
        )
    return files, listed


def _refuse_code(path: Path, config: Mapping[str, Any]) -> None:
    own = config.get("auto_map")
    if not own:
        return
    named = own.values() if isinstance(own, dict) else [own]
    shown = ", ".join(sorted({str(name) for name in named})[:_SHOWN])
    raise LoadError(
        f"{path / CONFIG} asks for code of its author (auto_map: {shown}): pass --trust-code "
        "(trust_code=True) to run it, or take auto_map out of the file to have the class of that "
        "name in transformers."
    )


def _require_counts(file: Path, config: Mapping[str, Any], size: int) -> None:
    """Raises LoadError for counts of layers or labels that weights of `size` bytes can't be for.

    transformers makes lists of that length before it reads any weight.
    """
    for name, value in config.items():
        if isinstance(value, dict):
            _require_counts(file, value, size)
        count = _COUNT.fullmatch(name)
        if count is None or not isinstance(value, int):
            continue
        if value < 0 or value * _LEAST_OF[count[1]] > size + _SLACK:
            raise LoadError(
                f"{file} says {name} = {value}, which weights of {size:,} bytes can't be for: "
                "fetch both again, from one revision."
            )


def _read(path: Path, kind: type[T], called: str) -> T:
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} can't be read ({error}); fetch it again.") from error
    if not isinstance(found, kind):
        raise LoadError(f"{path} holds a {type(found).__name__} where a JSON {called} belongs.")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    return _read(path, dict, "object")


def _contents(path: Path) -> str:
    names = sorted(item.name for item in path.iterdir())
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}" if names else "nothing"
