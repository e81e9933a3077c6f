"""The class of a checkpoint and its weights: a module of transformers, whose weights stay mapped.

transformers itself puts the weights into the class, as its from_pretrained does: it knows how names
have changed, which weights are tied or merged, and how buffers that no file has are computed. It
makes the parameters on the meta device, and takes over tensors that are mapped from a file.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from attngraph.checkpoints.codes import take_stored
from attngraph.checkpoints.folder import CONFIG, VOCABULARY, Folder, within
from attngraph.checkpoints.prefixes import shared_prefixes, taken_off
from attngraph.checkpoints.scheme import require_floats, require_plain_weights
from attngraph.checkpoints.stored import Held
from attngraph.checkpoints.tasks import NAMES, TASKS, Task, class_for, task_of
from attngraph.errors import LoadError, reason_of

_POOLER, _POOLING = "pooler.", "add_pooling_layer"
_SIZE = re.compile(r"(^|_)(heads?|dim|size|width|channels|kernel|stride|factor)$")
_FLOATS = ("float32", "float16", "bfloat16", "float64")
_ELSEWHERE = {"TF": "TensorFlow", "Flax": "Flax"}
_SHOWN = 3
_TIED, _LEAST, _SLACK = 4, 256, 1 << 20
"""Names of one stored weight, numbers that an entry of a file stands for, and what may be missing,
such as a pooler."""


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
    kind = getattr(transformers, name, None)
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
    return kind, found


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
    with torch.device("meta"), _quiet():
        return kind(_config(folder, kind, trust_code=trust_code))


def pretrained(
    folder: Folder,
    kind: Any,
    weights: Mapping[str, torch.Tensor],
    given: Collection[str] = (),
    *,
    trust_code: bool = False,
) -> tuple[torch.nn.Module, list[str]]:
    """The model in eval mode, with these weights; and sentences on what was done with them.

    Those `given` afterwards, by their names in the model, may be missing. Quantized ones stay in
    their codes where a kernel has those, and no adapter is added to them. Raises LoadError that
    names the first few parameters which the files lack.
    """
    config = _config(folder, kind, trust_code=trust_code)
    if folder.scheme is None:
        return _loaded(folder, kind, config, weights, given)
    plain = dict(weights)
    stored = take_stored(folder.scheme, plain)
    if not stored:
        module, notes = _loaded(folder, kind, config, plain, given)
        said = f"The settings say {folder.scheme.method}, and the weights are plain numbers."
        return module, [*notes, said]
    floats = [data.dtype for data in plain.values() if data.is_floating_point()]
    config.dtype = getattr(config, "dtype", None) or next(iter(floats), torch.float32)
    held = Held(folder.scheme.method, stored, config.dtype, packs=folder.adapter is None)
    with torch.device("meta"), _no_larger_than(folder):
        empty = kind(config)
    head = empty.get_output_embeddings()
    parts = dict(empty.named_modules())
    if any(held.has(name) for name, part in parts.items() if part is head):
        for each in (config, config.get_text_config()):  # in codes, it isn't the embedding
            each.tie_word_embeddings = False
    sideways = [name for name, part in parts.items() if type(part).__name__ == "Conv1D"]
    module, notes = _loaded(folder, kind, config, {**plain, **held.names(sideways)}, given)
    if unused := held.unused(module):
        held.spell_out(unused)
        module, notes = _loaded(folder, kind, config, {**plain, **held.names(sideways)}, given)
    return module, [*notes, *held.put(module)]


def _loaded(
    folder: Folder,
    kind: Any,
    config: Any,
    weights: Mapping[str, torch.Tensor],
    given: Collection[str],
) -> tuple[torch.nn.Module, list[str]]:
    faults: list[str] = []
    for prefix in ("", *shared_prefixes(weights)):
        named = {name.removeprefix(prefix): weight for name, weight in weights.items()}
        notes = []
        module, info, fault = _filled(folder, kind, config, named, given)
        if module is None and _POOLER in fault and _POOLING in inspect.signature(kind).parameters:
            module, info, _ = _filled(folder, kind, config, named, given, **{_POOLING: False})
            notes.append("The checkpoint has no pooler, so there is no pooler_output.")
        if module is None:
            faults.append(fault)
            continue
        if prefix:
            notes.append(taken_off(prefix))
        require_floats(folder.path, named, module)
        notes += _rounded(module, named)
        if left := sorted(info["unexpected_keys"]):
            require_plain_weights(folder.path, left)
            notes.append(
                f"{kind.__name__} has no place for {len(left)} of the weights ({_first(left)}): "
                "they were left out."
            )
        _read_generation(folder, module)
        return module.eval(), notes
    require_plain_weights(folder.path, weights)
    raise LoadError(
        f"{folder.path} doesn't fit {kind.__name__}: {faults[0]}; fetch {CONFIG} and the weights "
        "again, from one revision."
    )


def _rounded(module: Any, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """A sentence where the model's dtype has fewer digits than weights have in the files."""
    own = module.dtype
    finer = [
        data.dtype
        for data in weights.values()
        if data.is_floating_point() and torch.finfo(data.dtype).eps < torch.finfo(own).eps
    ]
    if not finer:
        return []
    here, there = (str(dtype).removeprefix("torch.") for dtype in (own, finer[0]))
    return [
        f"{len(finer)} weights are {there} in the files and rounded to {here}, as transformers "
        f"rounds them: {CONFIG} says that dtype, or none and the first weight has it. Write "
        f"{there} there to keep them."
    ]


def _filled(
    folder: Folder,
    kind: Any,
    config: Any,
    weights: Mapping[str, torch.Tensor],
    given: Collection[str],
    **options: bool,
) -> tuple[Any, Mapping[str, Any], str]:
    """(module, transformers' account of the loading, ""), or (None, {}, what is wrong)."""
    try:
        with _quiet(), _no_larger_than(folder):
            module, info = kind.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype="auto",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are told below, by name
                local_files_only=True,
                **options,
            )
    except LoadError:
        raise
    except Exception as error:
        return None, {}, f"{reason_of(error)}{_said(folder)}"
    if missing := sorted(info["missing_keys"] - set(given)):
        return None, {}, f"{len(missing)} of its weights are in no file ({_first(missing)})"
    odd = [
        f"{name} is {tuple(found)} in the file and {tuple(wanted)} in the model"
        for name, found, wanted in sorted(info["mismatched_keys"])
        if name not in given
    ]
    if odd:
        return None, {}, f"{len(odd)} of its weights have another shape ({_first(odd)})"
    if empty := sorted(n for n, t in _tensors(module) if t.is_meta):
        return None, {}, f"nothing has values for {_first(empty)}"
    return module, info, ""


def _said(folder: Folder) -> str:
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


@contextlib.contextmanager
def _no_larger_than(folder: Folder) -> Iterator[None]:
    """Within it a model is refused, while it is made, that the folder's files can't hold.

    transformers makes all of it, and memory for weights of other shapes than those in the files,
    before it says so. A parameter is on the meta device when it is made. It may be one of four that
    are tied and stored once; a number takes a byte at least, or a bit where it is quantized.
    """
    stored = sum(file.stat().st_size for file in folder.weights)
    room = stored * _TIED * (1 if folder.scheme is None else 8) + _SLACK

    def counted(_: Any, name: str, parameter: torch.nn.Parameter) -> None:
        nonlocal room
        if parameter.is_meta:
            room -= max(parameter.numel(), _LEAST)
        if room < 0:
            raise LoadError(
                f"{folder.path / CONFIG} describes a model with far more weights than the "
                f"{stored:,} bytes of {folder.path} hold (one {name} of it is "
                f"{tuple(parameter.shape)}): fetch both again, from one revision."
            )

    hook = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def _read_generation(folder: Folder, module: Any) -> None:
    """How it is to be sampled from, where the folder says it in a file of its own."""
    name = "generation_config.json"
    if not (module.can_generate() and within(folder.path, name).is_file()):
        return
    transformers = transformers_for(folder)
    try:
        with _quiet():
            found = transformers.GenerationConfig.from_pretrained(str(folder.path))
    except Exception as error:
        raise LoadError(f"{folder.path / name} can't be read: {reason_of(error)}.") from error
    _require_kinds(found, folder.path / name)
    module.generation_config = found


_IDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
_WHOLE = ("top_k", "no_repeat_ngram_size", "min_length", "max_length", "min_new_tokens")
_NUMBERS = ("temperature", "top_p", "repetition_penalty", "length_penalty")


def _require_kinds(generation: Any, path: Path) -> None:
    """Raises LoadError for a setting that isn't what its name says; transformers takes any."""
    for names, kinds, what in (
        (_IDS, int, "an id, or a list of ids"),
        (_WHOLE, int, "a whole number"),
        (_NUMBERS, (int, float), "a number"),
    ):
        for name in names:
            value = getattr(generation, name, None)
            each = value if names is _IDS and isinstance(value, (list, tuple)) else [value]
            if any(
                e is not None and (isinstance(e, bool) or not isinstance(e, kinds)) for e in each
            ):
                raise LoadError(f"{path} says {name} = {value!r}, which is not {what}: mend it.")


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _config(folder: Folder, kind: Any, *, trust_code: bool) -> Any:
    asked = folder.config.get("dtype", folder.config.get("torch_dtype"))
    if not (asked is None or isinstance(asked, dict) or asked in _FLOATS):
        raise LoadError(
            f"{folder.path / CONFIG} asks for the dtype {asked!r}, in which no model is computed: "
            f"write one of {', '.join(_FLOATS)}, or leave it out."
        )
    try:
        with _quiet():
            config = kind.config_class.from_pretrained(
                str(folder.path), trust_remote_code=trust_code, local_files_only=True
            )
    except Exception as error:
        raise LoadError(
            f"{folder.path / CONFIG} can't be read as that of a {kind.__name__}: "
            f"{reason_of(error)}{_said(folder)}."
        ) from error
    config.return_dict = True  # an output's name is its key
    for name, size in folder.sizes.items():
        setattr(config.get_text_config() if name == VOCABULARY else config, name, size)
    for part in (config, *vars(config).values()):  # what transformers needs other packages for
        if hasattr(part, "quantization_config"):
            del part.quantization_config
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
def _quiet() -> Iterator[None]:
    """Without transformers' bars and tables: what matters of them is told as a sentence."""
    logging: Any = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _first(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
