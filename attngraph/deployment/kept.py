"""What OUT/ holds, and whether it can be written; checked without torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from attngraph.checkpoints.folder import CONFIG, folders_of, model_in, within
from attngraph.checkpoints.scheme import BESIDE
from attngraph.checkpoints.stages import stages_of
from attngraph.errors import LoadError, OutputError
from attngraph.paths import data_beside, unwritable

_KEPT = frozenset(
    (".json", ".txt", ".model", ".jinja", ".md", ".tiktoken", ".spm", ".bpe", ".codes", ".vocab")
)
_KEPT_NAMES = frozenset(("LICENSE", "NOTICE", "LICENCE", "COPYING"))
_LEFT = ("trainer_state.json", "adapter_config.json", "all_results.json", *BESIDE)
_DEPTH = 2
_ONNX = (
    *("model", "encoder_model", "decoder_model", "decoder_with_past_model"),
    *("vision_encoder", "embed_tokens", "join_images", "image_positions", "decoder_model_merged"),
    *("audio_encoder", "join_sounds"),
)
_WRITTEN = frozenset((*(f"{name}.onnx" for name in _ONNX), "genai_config.json"))
"""What is written beside the files that are kept of the checkpoint."""


def kept_files(source: Path) -> dict[Path, Path]:
    """What OUT/ has of the checkpoint's folder, by paths inside it: all but weights and training.

    An adapter's own files stand before those of its base, but for the config, which is that of the
    model. Those of a model in a folder of its own stand beside the file, as the others do. Raises
    LoadError for a link that leads out of a folder, and for what can't be read.
    """
    base, *own = folders_of(source)
    model = model_in(source)
    around = [] if model == source else list(_kept(source, Path()))
    found = {n: source / n for n in around if not (source / n).is_relative_to(model)}
    found |= {name: base / name for name in _kept(base, Path())}
    stages = stages_of(source)
    kept = [] if stages is None else [each.weights for each in stages.steps]
    found |= {file.relative_to(source): file for file in kept if file is not None}
    for folder in own:
        found |= {n: folder / n for n in _kept(folder, Path()) if n != Path(CONFIG)}
    return found


def _kept(source: Path, inside: Path) -> Iterator[Path]:
    for item in (source / inside).iterdir():
        name = inside / item.name
        if item.name.startswith(".") or item.name in _LEFT:
            continue
        if item.is_dir():
            if len(name.parts) < _DEPTH and not item.is_symlink():
                yield from _kept(source, name)
            continue
        is_index = item.name.endswith(".index.json")
        if (item.suffix.lower() in _KEPT or item.name in _KEPT_NAMES) and not is_index:
            if not os.access(within(source, str(name)), os.R_OK):
                raise LoadError(f"{source / name} can't be read: Permission denied.")
            yield name


def require_folder(path: Path, source: Path | None) -> None:
    """Checks that OUT/ can be written, before any work is done.

    A folder that is there already is replaced where it holds what an earlier call wrote and nothing
    else. Raises OutputError, and as `kept_files` does.
    """
    files = {*_WRITTEN, *map(str, {} if source is None else kept_files(source))}
    try:
        if path.exists() and not path.is_dir():
            raise OutputError(f"{path} is a file; give a folder, or a name that ends in .onnx.")
        if not path.absolute().parent.is_dir():
            raise OutputError(
                f"There is no folder {path.parent}; create it or choose another path."
            )
        if source is not None and _are_nested(path.resolve(), source.resolve()):
            raise OutputError(
                f"{path} and the checkpoint {source} are one inside the other; choose another path."
            )
        if not path.is_dir():
            return
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")
        there = {str(item.relative_to(path)) for item in path.rglob("*") if not item.is_dir()}
        known = {*files, *(data_beside(Path(name)).name for name in _WRITTEN)}
        if others := sorted(there - known):
            raise OutputError(
                f"{path} holds {others[0]}, which isn't written here and would be lost: choose "
                "another path, or remove the folder."
            )
    except OSError as error:
        raise unwritable(path, error) from error


def _are_nested(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)
