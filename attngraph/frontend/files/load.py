"""From a model file, a factory, or both, to a module or an exported program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from attngraph.checkpoints.adapter_settings import require_plain
from attngraph.checkpoints.adapters import covered, merge, split
from attngraph.checkpoints.classes import class_of, encoder_of, unfilled
from attngraph.checkpoints.embeddings import module_of, put_behind
from attngraph.checkpoints.filled import pretrained
from attngraph.checkpoints.folder import MODULES, Folder, pickled
from attngraph.checkpoints.plain import require_dense
from attngraph.checkpoints.renamed import rename
from attngraph.checkpoints.resized import resized, said_otherwise
from attngraph.checkpoints.samples import samples_of
from attngraph.checkpoints.stages import Stage, stages_of
from attngraph.checkpoints.tasks import TASKS, Task, task_adapted, task_of
from attngraph.errors import LoadError
from attngraph.frontend.files.factory import Built, build
from attngraph.frontend.files.names import kind_of, refuse_factory, require_factory
from attngraph.frontend.files.pickles import load_pickle, unwrap_state_dict
from attngraph.frontend.files.pt2 import load_program
from attngraph.frontend.files.script import load_script
from attngraph.frontend.files.sniff import ModelKind, sniff
from attngraph.frontend.files.unfilled import build_unfilled
from attngraph.frontend.files.weights import check_materialised, fit_weights
from attngraph.frontend.interface.modalities import (
    PLACED_OTHERWISE,
    beside_text,
    first_place,
    joined_by,
    reads_text_alone,
    refuse_mixed,
)

EMBEDDED = f"{MODULES} makes a model of embeddings of it"
"""How a note begins on what was saved as a model that generates."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to be captured: exactly one of `module` (in eval mode) and `program` is set.

    `args` and `kwargs` are sample inputs and `dynamic_shapes` torch.export's, where the file or the
    factory gave them. `source` says in messages where the model came from. `module` may be a
    ScriptModule: capture it through `script_to_program`. `task` is that of a checkpoint's head.
    `notes` are sentences for the user, `settings` what its config.json says otherwise than that of
    its folder.
    """

    module: torch.nn.Module | None
    program: torch.export.ExportedProgram | None
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic_shapes: object | None = None
    source: str = ""
    task: Task | None = None
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def load(
    path: Path | None,
    *,
    factory: str | None = None,
    factory_args: Sequence[str] = (),
    trust_pickle: bool = False,
    trust_code: bool = False,
    task: str | None = None,
    samples: bool = True,
) -> Loaded:
    """Load `path`, or what `factory` (`pkg.mod:fn`) builds, or the weights of one into the other.

    `factory_args` are what it is called with, as `--factory-arg` has them.
    State dicts, safetensors and clean `.pt2` files load freely. Whatever could run code of the
    file's author (pickled modules, TorchScript, other `.pt2` files) is a LoadError unless
    `trust_pickle`. The factory is the user's own code and is simply called. A folder is a
    checkpoint of transformers: its class is the one of `task`, by default the one that was saved,
    and one of its author's own needs `trust_code`; without `samples` it gets none. Raises
    UsageError where file and factory don't go together.
    """
    kind = kind_of(path, factory)
    if path is None:
        assert factory is not None
        return _load_factory(factory, None, None, factory_args)
    if kind is ModelKind.CHECKPOINT and factory is None:
        folder = Folder.read(path, trust_pickle=trust_pickle, trust_code=trust_code)
        trusts = {"trust_pickle": trust_pickle, "trust_code": trust_code}
        return _from_folder(folder, task, samples=samples, **trusts)
    if kind is ModelKind.EXPORTED_PROGRAM:
        return _from_program(load_program(path, trust_pickle=trust_pickle), path)
    if kind is ModelKind.TORCHSCRIPT:
        script = load_script(path, trust_pickle=trust_pickle)
        return Loaded(script, None, None, source=str(path))
    if kind is ModelKind.SAFETENSORS:
        weights = _load_safetensors(path)
        return _load_factory(require_factory(path, factory), weights, path, factory_args)
    legacy = kind is ModelKind.LEGACY_PICKLE
    saved = load_pickle(path, legacy=legacy, trust_pickle=trust_pickle)
    return _from_saved(saved, path, factory, factory_args)


def _from_saved(saved: object, path: Path, factory: str | None, arguments: Sequence[str]) -> Loaded:
    if isinstance(saved, torch.nn.Module):
        refuse_factory(path, "a pickled module", factory)
        return Loaded(saved.eval(), None, None, source=str(path))
    weights = unwrap_state_dict(saved)
    if weights is None:
        raise LoadError(
            f"{path} holds a {type(saved).__name__} that is neither a module nor a state dict; "
            "save model.state_dict(), or the program with torch.export.save."
        )
    return _load_factory(require_factory(path, factory), weights, path, arguments)


def _from_folder(
    folder: Folder, task: str | None, *, trust_pickle: bool, trust_code: bool, samples: bool
) -> Loaded:
    adapter = folder.adapter
    if adapter is not None:
        require_plain(adapter.path, adapter.settings)
        task = task or task_adapted(adapter.settings.get("task_type"), folder.architecture)
    behind = stages_of(folder.root)
    makes_embeddings = behind is not None and behind.steps != () and task in (None, behind.task)
    task = behind.task if behind is not None and makes_embeddings else task
    kind, found = class_of(folder, task, trust_code=trust_code)
    if makes_embeddings:
        kind = encoder_of(folder, kind)
    found = _as_joined(found, kind, is_named=task is not None)
    if samples and found is not None:
        _refuse_mixed(folder, kind, found, trust_code=trust_code)
    weights = _read_shards(folder.weights, folder.listed, trust_pickle=trust_pickle)
    adapted, given = None, set[str]()
    if adapter is not None:
        adapted = split(adapter, _read_shards([adapter.weights], {}, trust_pickle=trust_pickle))
        rename(adapted, unfilled(folder, kind, trust_code=trust_code))
        folder = resized(folder, kind, adapted.whole, trust_code=trust_code)
    if adapted is not None and adapted.whole:
        given = covered(unfilled(folder, kind, trust_code=trust_code), adapted)
    module, notes = pretrained(folder, kind, weights, given, trust_code=trust_code)
    source, settings = str(folder.path), dict[str, Any]()
    if adapted is not None:
        merge(module, adapted)
        source, settings = str(adapted.path), said_otherwise(folder, module)
        told = f"{len(adapted.names)} weights of {folder.path}"
        notes.append(f"The adapter {adapted.path} was merged into {told}.")
    notes += [] if task else folder.notes
    if behind is not None and makes_embeddings:
        made_of = [_filled(each, trust_pickle=trust_pickle) for each in behind.steps]
        put_behind(module, behind, made_of)
        own = None if folder.architecture is None else task_of(folder.architecture)
        if own is not None and own.kind != "model":
            notes.append(f"{EMBEDDED}; --task {own.name} compiles what it was saved as.")
    notes += [] if behind is None else behind.notes
    if not samples or (found is not None and found.kind in ("seq2seq", "multimodal")):
        bare = Loaded(module, None, None, source=source, task=found, notes=tuple(notes))
        return replace(bare, settings=settings)
    made = samples_of(folder, module, found)
    if left := beside_text(type(module), made.kwargs):
        notes.append(
            f"{type(module).__name__} takes {', '.join(left)} as well, which the file doesn't: "
            "what it computes without them is compiled. Describe each input with --input to have "
            "them."
        )
    return Loaded(
        module,
        None,
        (),
        made.kwargs,
        made.shapes,
        source,
        task=found,
        notes=(*notes, *made.notes),
        settings=settings,
    )


def _filled(stage: Stage, *, trust_pickle: bool) -> torch.nn.Module:
    """What computes a stage, with its weights. Raises LoadError."""
    module, file = module_of(stage).eval(), stage.weights
    if file is None:
        return module
    if not file.is_file():
        raise LoadError(f"{file} is missing, which {MODULES} says makes the embeddings.")
    weights = _read_shards([file], {}, trust_pickle=trust_pickle)
    fit_weights(module, weights, file=str(file), factory=stage.kind)
    return module


def _as_joined(task: Task | None, kind: Any, *, is_named: bool) -> Task | None:
    """The task of a class whose images or sounds join its text, whichever list it stands in; one
    that takes text alone is a decoder of it."""
    kinds = joined_by(kind)
    if task is not None and task.kind == "multimodal" and not is_named and reads_text_alone(kind):
        return next(each for each in TASKS if each.kind == "decoder")
    if task is None or not kinds or task.kind not in ("seq2seq", "multimodal"):
        return task
    return replace(task, name=task.name if is_named else kinds[0].task, kind="multimodal")


def _refuse_mixed(folder: Folder, kind: Any, task: Task, *, trust_code: bool) -> None:
    """Raises UsageError where prompts hold images or sound that no compiler joins to the text."""
    because = None
    if task.kind == "multimodal":
        is_known = bool(joined_by(kind))
        if is_known and _moves_tokens(folder, kind, trust_code=trust_code):
            is_known, because = False, PLACED_OTHERWISE
    else:
        is_known = task.kind != "seq2seq" or not beside_text(kind)
    if not is_known:
        refuse_mixed(kind, str(folder.path), because)


def _moves_tokens(folder: Folder, kind: Any, *, trust_code: bool) -> bool:
    try:
        model = unfilled(folder, kind, trust_code=trust_code)
        return first_place(model, torch.ones(1, 2, dtype=torch.long)) is None
    except Exception:  # it wants numbers for that: it is tried again when it has them
        return False


def _read_shards(
    files: Sequence[Path], listed: Mapping[str, Path], *, trust_pickle: bool
) -> dict[str, torch.Tensor]:
    """The weights of all files together, by what the files are and not by what they are called.

    Raises LoadError where one is a pickle that isn't trusted, lacks what is listed in it, or holds
    other numbers than another one under the same name.
    """
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        kind = sniff(file)
        if kind is ModelKind.SAFETENSORS:
            found = _load_safetensors(file)
        elif kind in (ModelKind.TORCH_SAVE, ModelKind.LEGACY_PICKLE):
            if not trust_pickle:
                raise pickled(file.parent, file)
            legacy = kind is ModelKind.LEGACY_PICKLE
            saved = unwrap_state_dict(load_pickle(file, legacy=legacy, trust_pickle=True))
            if saved is None:
                raise LoadError(f"{file} holds no weights: it is no state dict; save it again.")
            require_dense(file, saved)
            found = saved
        else:
            raise LoadError(f"{file} holds no weights: it is {kind.value}; fetch it again.")
        if lost := [name for name, place in listed.items() if place == file and name not in found]:
            raise LoadError(
                f"{file} lacks {lost[0]}, which the index of the shards says is in it; fetch both "
                "again."
            )
        twice = (n for n in found if n in weights and not _are_equal(weights[n], found[n]))
        if odd := next(twice, None):
            raise LoadError(
                f"{file} and another shard hold different numbers for {odd}: fetch all shards and "
                "their index again, from one revision."
            )
        weights.update(found)
    return weights


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers in the same dtype; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool((one.isnan() & other.isnan() | (one == other)).all())


def _from_program(program: torch.export.ExportedProgram, path: Path) -> Loaded:
    sample = program.example_inputs
    args, kwargs = (tuple(sample[0]), dict(sample[1])) if sample is not None else (None, {})
    return Loaded(None, program, args, kwargs, source=str(path))


def _load_factory(
    factory: str,
    weights: dict[str, torch.Tensor] | None,
    path: Path | None,
    arguments: Sequence[str] = (),
) -> Loaded:
    notes: list[str] = []
    built = _filled_on_meta(factory, arguments, weights, path, notes)
    if built is None:
        built = build(factory, arguments)
        if weights is not None:
            notes = fit_weights(built.module, weights, file=str(path), factory=factory)
    source = factory if weights is None else f"{path} with {factory}"
    check_materialised(built.module, factory)
    return Loaded(
        built.module.eval(),
        None,
        built.args,
        built.kwargs,
        built.dynamic_shapes,
        source,
        notes=tuple(notes),
    )


def _filled_on_meta(
    factory: str,
    arguments: Sequence[str],
    weights: dict[str, torch.Tensor] | None,
    path: Path | None,
    notes: list[str],
) -> Built | None:
    """What the factory builds, its parameters never in memory; None where it is to be built as it
    is: without weights, and where they don't fit, so that the error is about the module itself.
    """
    built = None if weights is None else build_unfilled(factory, arguments)
    if built is None or weights is None:
        return None
    try:
        notes += fit_weights(built.module, weights, file=str(path), factory=factory)
        check_materialised(built.module, factory)
    except LoadError:
        return None
    return built


def _load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The weights by name, as transformers reads them: the first one's dtype may be that of all."""
    try:
        return dict(sorted(load_file(path).items()))
    except (SafetensorError, OSError, ValueError) as error:
        raise LoadError(
            f"{path} is a damaged safetensors file ({error}); save or fetch it again."
        ) from error
