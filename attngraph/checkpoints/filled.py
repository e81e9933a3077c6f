"""The weights of a checkpoint in its class: a module of transformers, whose weights stay mapped.

transformers itself puts the weights into the class, as its from_pretrained does: it knows how names
have changed, which weights are tied or merged, and how buffers that no file has are computed. It
makes the parameters on the meta device, and takes over tensors that are mapped from a file.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from attngraph.checkpoints.classes import FLOATS, config_of, quietly, sizes_said, transformers_for
from attngraph.checkpoints.codes import take_stored
from attngraph.checkpoints.folder import CONFIG, Folder, within
from attngraph.checkpoints.plain import require_floats, require_scaled
from attngraph.checkpoints.prefixes import shared_prefixes, taken_off
from attngraph.checkpoints.scheme import require_plain_weights
from attngraph.checkpoints.stored import Held
from attngraph.errors import LoadError, reason_of

_SHOWN = 3
_AGAIN = f"fetch {CONFIG} and the weights again, from one revision"
_POOLER, _POOLING = "pooler.", "add_pooling_layer"
_TIED, _LEAST, _SLACK = 4, 256, 1 << 20
"""Names of one stored weight, numbers that an entry of a file stands for, and what may be missing,
such as a pooler."""


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
    config = config_of(folder, kind, trust_code=trust_code)
    _require_dtype(folder, config, weights)
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


def _require_dtype(folder: Folder, config: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises LoadError where no dtype is said, and that of the weights is none to compute in."""
    floats = (data.dtype for data in weights.values() if data.is_floating_point())
    first = str(next(floats, torch.float32)).removeprefix("torch.")
    if getattr(config, "dtype", None) is None and folder.scheme is None and first not in FLOATS:
        raise LoadError(
            f"{folder.path / CONFIG} says no dtype, and the first weight is {first}, in which no "
            f"model is computed: write one of {', '.join(FLOATS)} there."
        )


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
        left = sorted(info["unexpected_keys"])
        require_plain_weights(folder.path, left)
        require_scaled(folder.path, named, left)
        require_floats(folder.path, named, module, left)
        notes += _rounded(module, named)
        if left:
            notes.append(
                f"{kind.__name__} has no place for {len(left)} of the weights ({_first(left)}): "
                "they were left out."
            )
        _read_generation(folder, module)
        return module.eval(), notes
    require_plain_weights(folder.path, weights)
    raise LoadError(f"{folder.path} doesn't fit {kind.__name__}: {faults[0]}.")


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
    count = "1 weight is" if len(finer) == 1 else f"{len(finer)} weights are"
    return [
        f"{count} {there} in the files and rounded to {here}, as transformers rounds them: "
        f"{CONFIG} says that dtype, or none and the first weight has it. Write {there} there "
        "to keep them."
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
        with quietly(), _no_larger_than(folder):
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
        said = f"{reason_of(error)}{sizes_said(folder)}"
        return None, {}, f"{said}; mend {CONFIG}, or give the weights to a --factory that makes it"
    if missing := sorted({*info["missing_keys"]} - {*given}):
        said = f"{len(missing)} of its weights are in no file ({_first(missing)})"
        if left := sorted(info["unexpected_keys"]):
            said += f", and it has no place for others in them ({_first(left)})"
        saved = folder.architecture
        if saved not in (None, kind.__name__) and folder.adapter is None:
            said += f"; the checkpoint is a {saved}: leave out --task to have its own head"
            return None, {}, f"{said}, or train a {kind.__name__} and save that"
        return None, {}, f"{said}; {_AGAIN}, or save the weights by the names of the class"
    odd = [
        f"{name} is {tuple(found)} in the file and {tuple(wanted)} in the model"
        for name, found, wanted in sorted(info["mismatched_keys"])
        if name not in given
    ]
    if odd:
        said = f"{len(odd)} of its weights have another shape ({_first(odd)})"
        return None, {}, f"{said}; {_AGAIN}"
    if empty := sorted(n for n, t in _tensors(module) if t.is_meta):
        return None, {}, f"nothing has values for {_first(empty)}; {_AGAIN}"
    return module, info, ""


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
        with quietly():
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
    penalty = getattr(generation, "repetition_penalty", None)
    if penalty is not None and penalty <= 0:
        raise LoadError(
            f"{path} says repetition_penalty = {penalty}, which is not a number above 0: mend it."
        )


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _first(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
