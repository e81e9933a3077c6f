"""The class of a checkpoint and its config, as transformers has them."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch

from attngraph.checkpoints.folder import CONFIG, VOCABULARY, Folder
from attngraph.checkpoints.tasks import NAMES, TASKS, Task, class_for, task_of
from attngraph.errors import LoadError, reason_of

_SIZE = re.compile(r"(^|_)(heads?|dim|size|width|channels|kernel|stride|factor)$")
FLOATS = ("float32", "float16", "bfloat16", "float64")
_ATTENTION, _PLAIN = "_attn_implementation", ("eager", "sdpa")
_ELSEWHERE = {"TF": "TensorFlow", "Flax": "Flax"}


def transformers_for(folder: Folder) -> Any:
    """The package. Raises LoadError where it isn't installed."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise LoadError(
            f"{folder.path} is a checkpoint of transformers, which can't be imported here "
            f"({error}): pip install 'attngraph[transformers]'."
        ) from error


def class_of(
    folder: Folder, task: str | None, *, trust_code: bool = False
) -> tuple[Any, Task | None]:
    """The class to load and its task; None where the table of tasks lacks its head.

    Raises LoadError where there is no such class, UsageError where the task doesn't go with it.
    """
    transformers = transformers_for(folder)
    name, model_type = folder.architecture, str(folder.config.get("model_type"))
    own = folder.config.get("auto_map")
    if trust_code and isinstance(own, dict):
        given = [item for item in TASKS if item.name == task]
        found = next(iter(given), None) or (None if name is None else task_of(name))
        return _own_class(folder, own, name), found
    if task is not None:
        found, name = class_for(task, name, model_type)
    elif name is None:
        raise LoadError(
            f"{folder.path / CONFIG} names no architectures, so the model's class isn't known: "
            f"pass --task, one of {', '.join(NAMES)}."
        )
    else:
        found = task_of(name)
    kind = _named(transformers, name, model_type)
    if kind is None or not _is_model(transformers, kind):
        said = f"{folder.path / CONFIG} names the architecture {name}, which"
        version = f"transformers {transformers.__version__}"
        for prefix, of in _ELSEWHERE.items():
            here = name.removeprefix(prefix)
            if here != name and _is_model(transformers, getattr(transformers, here, None)):
                raise LoadError(
                    f"{said} is a class of {of}: write {here} there, which has the same weights in "
                    "PyTorch's files."
                )
        if kind is None and folder.config.get("transformers_version") == transformers.__version__:
            raise LoadError(
                f"{said} {version} lacks, and saved: it is a class of its author's own. Give the "
                "weights to a --factory that makes it, or write the name of a class of "
                "transformers that computes the same."
            )
        if _runs_others(transformers, kind):
            raise LoadError(
                f"{said} runs several models in its generate and has no forward, so there is no "
                "one graph of it: a --factory that returns one of them, with samples, compiles it."
            )
        raise LoadError(
            f"{said} {version} lacks: install the version that it was saved with"
            f"{_version(folder)}, or give the weights to a --factory of your own."
            if kind is None
            else f"{said} is no model in {version}: write the class that was saved, or pass --task."
        )
    _require_one_type(folder, kind, model_type)
    return kind, found


def encoder_of(folder: Folder, kind: Any) -> Any:
    """The encoder alone of a class whose decoder gives no tokens of the text, where transformers
    has one; else the class."""
    takes = inspect.signature(kind.forward).parameters
    if "decoder_input_ids" not in takes:
        return kind
    name = f"{kind.__name__.removesuffix('Model')}EncoderModel"
    return getattr(transformers_for(folder), name, kind)


def _named(transformers: Any, name: str, model_type: str) -> Any:
    """What transformers has by this name, or keeps in the module of the model type: its parts are
    classes of models too, and not all can be imported from the package."""
    if (kind := getattr(transformers, name, None)) is not None:
        return kind
    auto: Any = import_module("transformers.models.auto.configuration_auto")
    place = auto.model_type_to_module_name(model_type)
    try:
        module = import_module(f"transformers.models.{place}.modeling_{place.rpartition('.')[2]}")
    except (ImportError, ValueError):  # no such type; the folder's words may be no name at all
        return None
    kind = getattr(module, name, None)
    return kind if _is_model(transformers, kind) else None


def _require_one_type(folder: Folder, kind: Any, said: str) -> None:
    """Raises LoadError where the model type is that of another class than the architecture.

    transformers goes by the type, and what the config says means something else to another model.
    A part of a model may be saved with the config of the whole.
    """
    auto: Any = import_module("transformers.models.auto.configuration_auto")
    own = kind.config_class
    if said == own.model_type or said not in auto.CONFIG_MAPPING:
        return
    theirs = auto.CONFIG_MAPPING[said]
    parts = [part for part in folder.config.values() if isinstance(part, dict)]
    is_part = own.base_config_key in folder.config or any(
        part.get("model_type") == own.model_type for part in parts
    )
    is_listed = any(kind.__name__ in task.classes().get(said, ()) for task in TASKS)
    if is_part or is_listed or issubclass(theirs, own) or issubclass(own, theirs):
        return
    raise LoadError(
        f"{folder.path / CONFIG} says model_type {said} and names the architecture "
        f"{kind.__name__}, which is of the type {own.model_type}: write the type or the "
        "architecture of the model that was trained."
    )


def _is_model(transformers: Any, kind: Any) -> bool:
    """Whether it is a class of a model that can be run; that of a family's models can't."""
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return is_model and kind.forward is not torch.nn.Module.forward


def _runs_others(transformers: Any, kind: Any) -> bool:
    """Whether it is a model that has no forward, and generates by those of its parts."""
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return is_model and bool(kind.can_generate())


def unfilled(folder: Folder, kind: Any, *, trust_code: bool = False) -> Any:
    """The model of the folder's config without its numbers: all of it on the meta device."""
    with torch.device("meta"), quietly():
        return kind(config_of(folder, kind, trust_code=trust_code))


def sizes_said(folder: Folder) -> str:
    """The sizes below 1 that a config says, for the end of a reason: no error of transformers names
    what it divides by."""
    found = [f"{name} = {value}" for name, value in _sizes(folder.config) if value < 1]
    return f" ({CONFIG} says {', '.join(found)})" if found else ""


def _sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _sizes(value)
        elif type(value) is int and _SIZE.search(name):
            yield name, value


def config_of(folder: Folder, kind: Any, *, trust_code: bool) -> Any:
    asked = folder.config.get("dtype", folder.config.get("torch_dtype"))
    if not (asked is None or isinstance(asked, dict) or asked in FLOATS):
        raise LoadError(
            f"{folder.path / CONFIG} asks for the dtype {asked!r}, in which no model is computed: "
            f"write one of {', '.join(FLOATS)}, or leave it out."
        )
    try:
        with quietly():
            config = kind.config_class.from_pretrained(
                str(folder.path), trust_remote_code=trust_code, local_files_only=True
            )
    except Exception as error:
        raise LoadError(
            f"{folder.path / CONFIG} can't be read as that of a {kind.__name__}: "
            f"{reason_of(error)}{sizes_said(folder)}."
        ) from error
    config.return_dict = True  # an output's name is its key
    for name, size in folder.sizes.items():
        setattr(config.get_text_config() if name == VOCABULARY else config, name, size)
    for part in (config, *vars(config).values()):  # what transformers needs other packages for
        if hasattr(part, "quantization_config"):
            del part.quantization_config
        if getattr(part, _ATTENTION, None) not in (None, *_PLAIN):
            setattr(part, _ATTENTION, None)  # another kernel for the same numbers
    return config


def _own_class(folder: Folder, places: Mapping[str, Any], name: str | None) -> Any:
    """The class of the folder's own code, which is imported here."""
    models = {key: place for key, place in places.items() if key.startswith("AutoModel")}
    chosen = [p for p in models.values() if str(p).rpartition(".")[2] == name]
    place = next(iter(chosen or models.values()), None)
    if not isinstance(place, str) or "--" in place:
        raise LoadError(
            f"{folder.path / CONFIG} names no class in a file of the folder (auto_map: "
            f"{', '.join(map(str, places.values()))})."
        )
    code: Any = import_module("transformers.dynamic_module_utils")
    try:
        return code.get_class_from_dynamic_module(place, str(folder.path), local_files_only=True)
    except Exception as error:
        raise LoadError(
            f"{folder.path}: the class {place} can't be imported: {type(error).__name__}: "
            f"{reason_of(error)}."
        ) from error


def _version(folder: Folder) -> str:
    saved = folder.config.get("transformers_version")
    return f" ({saved})" if isinstance(saved, str) else ""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppresses progress bars, tables and warnings: what matters is told as a sentence."""
    logging: Any = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
