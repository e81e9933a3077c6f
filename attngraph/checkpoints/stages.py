"""What a folder of sentence-transformers says of its embeddings; checked without torch.

Its modules.json lists the model of transformers, and behind it what makes one embedding of a text's
tokens. What isn't known here is told, and the file has what the model itself returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attngraph.checkpoints.folder import (
    MODULES,
    entries_of,
    is_model,
    kind_of,
    model_in,
    read_json,
    within,
)

TOKENS, EMBEDDING = "token_embeddings", "sentence_embedding"
_FIRST = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlnet_config.json")
RETURNED = {"feature-extraction": "last_hidden_state", "fill-mask": "logits"}
"""The output that holds a model's tokens, by its task."""
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Pooling by older names, in the order in which their embeddings are joined."""
_POOLINGS = ("Pooling", "SpladePooling")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Stage:
    """One step behind the model, with what it reads and writes of the features.

    `weights` is the file that has its numbers, if it has any.
    """

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    weights: Path | None = None

    @property
    def read(self) -> str:
        default = TOKENS if self.kind in _POOLINGS else EMBEDDING
        return str(self.settings.get("module_input_name") or default)

    @property
    def written(self) -> str:
        default = EMBEDDING if self.kind in _POOLINGS else self.read
        return str(self.settings.get("module_output_name") or default)


@dataclass(frozen=True)
class Stages:
    """What modules.json says: the task of the model, and the steps behind it.

    There are no steps where one of them isn't known here. `notes` are sentences for the user.
    """

    task: str
    steps: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = ()


def stages_of(root: Path) -> Stages | None:
    """What the folder's modules.json says; None where there is none, or only a model in it.

    Raises LoadError for a file that can't be read.
    """
    entries = entries_of(root)
    if len(entries) < 2:
        return None
    first, *others = entries
    model = model_in(root)
    settings = next((s for name in _FIRST if (s := read_json(model, name)) is not None), {})
    default = "fill-mask" if kind_of(first) == "MLMTransformer" else "feature-extraction"
    task = str(settings.get("transformer_task", default))
    is_known = is_model(first) and _gives(settings, task)
    found = [_stage(root, each) for each in others] if is_known else []
    steps = tuple(each for each in found if each is not None)
    if len(steps) < len(others) or not _are_given(steps):
        names = " then ".join(str(each.get("type")).rpartition(".")[2] for each in others)
        told = (
            f"{MODULES} says that {names} of sentence-transformers makes the embeddings of what "
            "the model returns: the file has what the model returns, and its caller is to do the "
            "rest."
        )
        return Stages(task, notes=(told,))
    if not all(each.settings.get("include_prompt", True) for each in steps):
        told = (
            f"Pooling leaves out the tokens of a prompt, of which the file isn't told: {EMBEDDING} "
            "is that of texts without one."
        )
        return Stages(task, steps, (told,))
    return Stages(task, steps)


def _gives(settings: Mapping[str, Any], task: str) -> bool:
    """Whether the model's tokens are what its forward returns for text."""
    if task not in RETURNED:
        return False
    places = settings.get("modality_config")
    text = places.get("text") if isinstance(places, dict) else None
    told = text if isinstance(text, dict) else {}
    asked = {
        settings.get("module_output_name", TOKENS): TOKENS,
        told.get("method", "forward"): "forward",
        told.get("method_output_name", RETURNED[task]): RETURNED[task],
    }
    return all(said == known for said, known in asked.items())


def _are_given(steps: Sequence[Stage]) -> bool:
    """Whether each step reads what the model or an earlier step gives."""
    given = {TOKENS}
    for each in steps:
        if each.read not in given and each.kind != "Dropout":
            return False
        given.add(each.written)
    return True


def _stage(root: Path, entry: Mapping[str, Any]) -> Stage | None:
    """The stage that an entry of modules.json is; None for one that isn't known here."""
    kind, path = kind_of(entry), str(entry.get("path"))
    settings = {} if kind == "Dropout" else dict(read_json(root, f"{path}/config.json") or {})
    match kind:
        case "Pooling":
            modes = settings.get("pooling_mode")
            if modes is None:
                modes = [mode for name, mode in _MODES.items() if settings.get(name)] or ["mean"]
            modes = [modes] if isinstance(modes, str) else modes
            is_known = isinstance(modes, list) and all(mode in _MODES.values() for mode in modes)
            if not is_known or not modes:
                return None
            return Stage(kind, {**settings, "pooling_mode": modes})
        case "SpladePooling":
            way, curve = settings.get("pooling_strategy"), settings.get("activation_function")
            is_known = way in (None, "max", "sum") and curve in (None, "relu", "log1p_relu")
            return Stage(kind, settings) if is_known else None
        case "Normalize" | "Dropout":
            return Stage(kind, settings)
        case "Dense":
            sizes = (settings.get("in_features"), settings.get("out_features"))
            name = settings.get("activation_function", "torch.nn.Tanh")
            if not all(map(_is_size, sizes)) or not _is_of_torch(name):
                return None
            return Stage(kind, {**settings, "activation_function": name}, _weights(root, path))
        case "LayerNorm" if _is_size(settings.get("dimension")):
            return Stage(kind, settings, _weights(root, path))
    return None


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_of_torch(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("torch.nn.")


def _weights(root: Path, path: str) -> Path:
    files = [within(root, f"{path}/{name}") for name in _WEIGHTS]
    return next((file for file in files if file.is_file()), files[0])
