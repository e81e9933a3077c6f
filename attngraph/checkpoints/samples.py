"""Sample inputs of a checkpoint's model, by the names of its forward, and which dims are dynamic.

Lengths may be anything up to the model's real maximum; images have the size that their preprocessor
makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from attngraph.checkpoints.folder import Folder
from attngraph.checkpoints.named import BESIDE, STEPS, TOGETHER, axes_of
from attngraph.checkpoints.tasks import Task
from attngraph.errors import UsageError
from attngraph.inference import inference

_ROWS, _TOKENS, _CHOICES, _FRAMES, _SAMPLES, _SIDE = 2, 8, 3, 6, 4000, 224
_PAIR = 2  # images that are compared with each other
_LONGER = 4
"""Times as many samples of sound, for heads that leave out most of what they hear."""
_MAXIMA = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
    "seq_length",
)
_SOME = 4096  # ids to draw from
_PLACES = 1000  # of a corner on a page, as tokenizers of pages scale them
_UNBOUNDED = 1 << 24  # tokens; tokenizers and configs write "no limit" as a very large number


@dataclass
class Samples:
    """`kwargs` of a call, and torch.export's `shapes` for them; what is no tensor is a constant.

    `notes` are sentences for the user.
    """

    kwargs: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: Tensor, dims: Mapping[int, Any] | None) -> None:
        self.kwargs[name] = value
        self.shapes[name] = dict(dims) if dims else None


def samples_of(folder: Folder, model: Any, task: Task | None) -> Samples:
    """What the model is traced with. Raises UsageError where none is known for what it needs."""
    made = list(_Maker(folder, model, task).candidates())
    if _may_lack_padding(model, task) and not _runs(model, made[0]):
        found = next(_Maker(folder, model, task, rows=1).candidates())
        if _runs(model, found):
            found.notes.append(
                f"config.json names no pad_token_id, without which {type(model).__name__} takes "
                "one row of text: so does the file. Write the id of the tokenizer's padding token "
                "there to have more."
            )
            return found
    return made[0] if len(made) == 1 else next((m for m in made if _runs(model, m)), made[0])


def _runs(model: Any, samples: Samples) -> bool:
    """Whether the model takes these samples."""
    try:
        with inference(model):
            model(**samples.kwargs)
    except Exception:
        return False
    return True


def _may_lack_padding(model: Any, task: Task | None) -> bool:
    """Whether a head may find no end of several rows: by their padding, of which it isn't told."""
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    return task is not None and task.name == "text-classification" and pad is None


def longest(model: Any) -> int | None:
    """The most tokens that a text model takes, if it has a limit.

    A table of positions with a row for padding counts from behind that row, as RoBERTa's does.
    """
    config = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limits = (getattr(config, name, None) for name in _MAXIMA)
    found = next((n for n in limits if isinstance(n, int) and 0 < n < _UNBOUNDED), None)
    tables = [
        part.num_embeddings - part.padding_idx - 1
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Embedding)
        and part.padding_idx is not None
        and "position" in name.rpartition(".")[2]
    ]
    return min((n for n in (found, *tables) if n is not None), default=None)


class _Maker:
    def __init__(self, folder: Folder, model: Any, task: Task | None, *, rows: int = _ROWS) -> None:
        self.folder, self.model, self.task, self.rows = folder, model, task, rows
        self.config: Any = model.config
        self.taken = inspect.signature(model.forward).parameters
        self.random = torch.Generator().manual_seed(0)
        self.found = Samples()

    def candidates(self) -> Iterator[Samples]:
        """The samples that the model may take, the first that it does take to be kept.

        Of text and images a model may take other numbers (CLIP compares all with all), as many
        (ViLT), or images only where tokens stand for them. What has more than one form is tried in
        each. Raises UsageError where nothing is known for an input.
        """
        fault: UsageError | None = None
        made = 0
        for mains, apart in self._asked():
            for form in range(max(self._forms(name) for name in mains)):
                try:
                    found = self._made(mains, apart=apart, form=form)
                except UsageError as error:
                    fault = fault or error
                    continue
                made += 1
                yield found
        if fault is not None and not made:
            raise fault

    def _asked(self) -> Iterator[tuple[list[str], bool]]:
        """Names of inputs, beside which all are given that the model requires, and whether the rows
        of one aren't those of the others."""
        mains = self.model.main_input_name
        mains = [mains] if isinstance(mains, str) else list(mains)
        mains = [name for name in mains if name in self.taken] or self._required() or mains
        if mains[:1] == [TOGETHER[0]]:
            mains += self._known(TOGETHER[1:])
        if "input_ids" in self.taken and "pixel_values" in self.taken and self._sees():
            both = ["input_ids", "pixel_values"]
            yield both, True
            yield both, False
            if "decoder_input_ids" in self.taken:
                yield [*both, "decoder_input_ids"], False
        yield mains, len(mains) > 1 and "input_ids" in mains
        if "decoder_input_ids" in self.taken:
            yield [*mains, "decoder_input_ids"], False
        if beside := [name for name in self._known(BESIDE) if name not in mains]:
            yield [*mains, *beside], False
        if {"input_ids", "input_features"} <= self.taken.keys() and mains == ["input_ids"]:
            yield ["input_ids", "input_features"], True

    def _known(self, names: Sequence[str]) -> list[str]:
        """The inputs that the model takes, and whose sizes its config has."""
        return [n for n in names if n in self.taken and axes_of(n, self.config) is not None]

    def _forms(self, name: str) -> int:
        """How many forms samples of an input may have, the likeliest first."""
        match name:
            case "pixel_values":
                return 2  # or frames of each, or pairs to compare
            case "inputs":
                return 2
            case "input_values" | "input_features":
                return 3
        return 1

    def _sees(self) -> bool:
        """Whether the config is one of a model with eyes: some are configured without."""
        return any(self._of_vision(name) for name in _SIDES)

    def _made(self, mains: Sequence[str], *, apart: bool = False, form: int = 0) -> Samples:
        self.found = Samples()
        for name in dict.fromkeys((*mains, *self._required())):
            self._add(name, apart, form)
        for name in ("use_cache", "use_mems"):
            if name in self.taken:
                self.found.kwargs[name] = False
                self.found.shapes[name] = None
        return self.found

    def _required(self) -> list[str]:
        return [
            name
            for name, parameter in self.taken.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]

    def _add(self, name: str, apart: bool, form: int) -> None:
        """An input in one of its forms; `apart` where its rows aren't those of the others."""
        if name in self.found.kwargs:
            return
        seen = ("image_batch", _ROWS + 1) if apart else ("batch", _ROWS)
        match name:
            case "input_ids":
                self._text("text_batch" if apart else "batch")
            case "attention_mask" if "input_ids" in self.found.kwargs:
                pass
            case "inputs" if form == 0:  # of any kind, such as Perceiver's: text or images
                self._text("batch", name)
            case "decoder_input_ids":
                self._target()
            case "pixel_values" | "pixel_values_videos" | "inputs":
                self._image(name, *seen, of_frames=name != "inputs" and form == 1)
            case "input_values":
                self._waveform(form)
            case "input_features":
                self._spectrogram(*(("sound_batch", _ROWS + 1) if apart else seen), form)
            case _:
                self._by_config(name)

    def _unknown(self, name: str) -> UsageError:
        kind = type(self.model).__name__
        return UsageError(
            f"{self.folder.path} is a {kind}, for whose input {name} attngraph has no samples: "
            "describe each input with --input, or write a --factory that returns (module, args, "
            "dynamic_shapes)."
        )

    def _text(self, batch_name: str, name: str = "input_ids") -> None:
        most = longest(self.model)
        length = _TOKENS if most is None else min(_TOKENS, most)
        batch, seq = Dim(batch_name), Dim("seq", max=most)
        lead: tuple[int, ...] = (self.rows,)
        dims: dict[int, Any] = {0: batch} if self.rows > 1 else {}
        if self.task is not None and self.task.name == "multiple-choice":
            lead, dims = (self.rows, _CHOICES), {0: batch, 1: Dim("choices")}
        if length > 1:
            dims[len(lead)] = seq
        shape = (*lead, length)
        self.found.add(name, self._tokens(shape), dims)
        if "attention_mask" in self.taken:
            self.found.add("attention_mask", torch.ones(shape, dtype=torch.long), dims)
        if "token_type_ids" in self.taken and self._has_types():
            kinds = getattr(self.config, "type_vocab_sizes", None)  # of a table: rows, columns, …
            types = (*shape, len(kinds)) if isinstance(kinds, list | tuple) else shape
            self.found.add("token_type_ids", torch.zeros(types, dtype=torch.long), dims)
        if "bbox" in self.taken:
            places = getattr(self.config, "max_2d_position_embeddings", None) or _PLACES
            half = max(1, min(places, _PLACES) // 2)
            corners, sides = torch.randint(half, (2, *shape, 2), generator=self.random)
            self.found.add("bbox", torch.cat([corners, corners + sides], -1), dims)

    def _target(self) -> None:
        """What a decoder of text has before it, beside what is encoded."""
        most = getattr(self.config, "max_target_positions", None) or longest(self.model)
        rows = len(next(iter(self.found.kwargs.values()), range(self.rows)))
        dims = {1: Dim("decoder_seq", max=most)} | ({0: Dim("batch")} if rows > 1 else {})
        self.found.add("decoder_input_ids", self._tokens((rows, _TOKENS - 2)), dims)

    def _by_config(self, name: str) -> None:
        """An input whose sizes the config has by names of its own."""
        axes = axes_of(name, self.config)
        if axes is None:
            raise self._unknown(name)
        sizes = [_FRAMES if size is STEPS else size for size in axes.sizes]
        dims = {0: Dim("batch")} | {
            axis + 1: Dim(axes.steps, max=axes.most)
            for axis, size in enumerate(axes.sizes)
            if size is STEPS and axes.steps
        }
        shape = (_ROWS, *sizes)
        value = torch.rand(shape, generator=self.random)
        if axes.is_mask:
            value = torch.ones(shape)
        if axes.below is not None:
            value = torch.randint(axes.below, shape, generator=self.random)
        self.found.add(name, value, dims)

    def _has_types(self) -> bool:
        """Whether the tokenizer gives token types, and the model has more than one."""
        several = max(getattr(self.config, "type_vocab_sizes", None) or [0])
        if max(getattr(self.config, "type_vocab_size", 0) or 0, several) < 2:
            return False
        given = self.folder.optional("tokenizer_config.json").get("model_input_names")
        return not isinstance(given, list) or "token_type_ids" in given

    def _tokens(self, shape: tuple[int, ...]) -> Tensor:
        """Ids without a meaning of their own, none that pads or stands for an image; then the end.

        Some heads read the state of the token that ends each row.
        """
        try:
            count = self.model.get_input_embeddings().num_embeddings
        except (AttributeError, NotImplementedError):  # of several parts, or of a class of its own
            count = getattr(self.config.get_text_config(), "vocab_size", _SOME)  # or it hashes any
        special = set(_ids(self.config.to_dict()))
        plain = torch.tensor([i for i in range(min(count, _SOME)) if i not in special] or [0])
        ids = plain[torch.randint(len(plain), shape, generator=self.random)]
        end = getattr(self.config.get_text_config(), "eos_token_id", None)
        if isinstance(end, int) and 0 <= end < count:
            ids[..., -1] = end
        return ids

    def _image(self, name: str, batch_name: str, rows: int, *, of_frames: bool) -> None:
        channels = self._of_vision("num_channels") or self._of_vision("in_channels") or 3
        height, width = self._size()
        shape: tuple[int, ...] = (rows, channels, height, width)
        frames = self._of_vision("num_frames") or self._of_vision("frames_per_clip")
        is_video = name.endswith("videos") or of_frames
        if self.task is not None and "video" in self.task.name:
            is_video = True
        if of_frames and not isinstance(frames, int):
            frames = _PAIR
        if isinstance(frames, int) and is_video:
            shape = (rows, frames, *shape[1:])
        image = torch.randn(shape, generator=self.random)
        self.found.add(name, image, {0: Dim(batch_name)})

    def _size(self) -> tuple[int, int]:
        """(height, width) of an image as the model gets it."""
        settings = self.folder.optional("preprocessor_config.json")
        if not settings:
            settings = self.folder.optional("processor_config.json").get("image_processor") or {}
        crops = settings.get("do_center_crop") and settings.get("crop_size")
        pads = settings.get("do_pad") and settings.get("pad_size")
        resized = settings.get("do_resize", True) and settings.get("size")
        for size in (crops, pads, resized, *map(self._of_vision, _SIDES)):
            if (found := _height_and_width(size)) is not None:
                if size is resized and isinstance(size, Mapping) and "shortest_edge" in size:
                    self.found.notes.append(
                        f"The preprocessor makes the shorter edge of an image {found[0]} and cuts "
                        f"nothing off: the file takes images of {found[0]} by {found[1]} alone. "
                        "Resize to that, or describe other ones with --input."
                    )
                return found
        return _SIDE, _SIDE

    def _of_vision(self, name: str) -> Any:
        """A setting of the config, or of its vision part."""
        for part in (self.config, *(getattr(self.config, n, None) for n in _VISION)):
            if (value := getattr(part, name, None)) is not None:
                return value
        return None

    def _waveform(self, form: int) -> None:
        """Samples (B, T), longer ones, or those of channels (B, C, T); or frames of a spectrogram
        (B, frames, bins)."""
        bins, frames = (getattr(self.config, n, None) for n in ("num_mel_bins", "max_length"))
        dims: dict[int, Any] = {0: Dim("batch")}
        if bins and frames and not hasattr(self.config, "conv_stride"):
            shape: tuple[int, ...] = (_ROWS, frames, bins)
        else:
            channels = (getattr(self.config, "audio_channels", None) or 1,) if form == 2 else ()
            shape = (_ROWS, *channels, _SAMPLES * (_LONGER if form else 1))
            dims[len(shape) - 1] = Dim("samples")
        self.found.add("input_values", torch.randn(shape, generator=self.random), dims)

    def _spectrogram(self, batch_name: str, rows: int, form: int) -> None:
        """Bins of as many frames as the model has places for (B, bins, frames), as Whisper's
        encoder takes; or frames (B, frames, bins), (B, bins, frames) or (B, 1, frames, bins)."""
        bins = self._of_sound("num_mel_bins")
        places = getattr(self.config, "max_source_positions", None)
        dims: dict[int, Any] = {0: Dim(batch_name)}
        if bins and places and not hasattr(self.config, "input_feat_per_channel"):
            shape: tuple[int, ...] = (rows, bins, 2 * places)
        else:
            width = getattr(self.config, "input_feat_per_channel", None)
            width = width or getattr(self.config, "feature_projection_input_dim", None) or bins
            if not isinstance(width, int):
                raise self._unknown("input_features")
            frames = 16 * _FRAMES
            shape = ((rows, frames, width), (rows, width, frames), (rows, 1, frames, width))[form]
            if form == 2 and (whole := self._frames_of_sound(width)) is not None:
                shape = (rows, 1, whole, width)
            else:
                dims[(1, 2, 2)[form]] = Dim("frames")
        self.found.add("input_features", torch.randn(shape, generator=self.random), dims)
        if "attention_mask" in self.taken and dims.keys() == {0, 1}:
            self.found.add("attention_mask", torch.ones(shape[:2], dtype=torch.long), dims)

    def _of_sound(self, name: str) -> Any:
        """A setting of the config, or of its part that listens."""
        parts = (self.config, *(getattr(self.config, n, None) for n in _SOUND))
        return next((v for part in parts if (v := getattr(part, name, None)) is not None), None)

    def _frames_of_sound(self, bins: int) -> int | None:
        """How many frames there are in a spectrogram that is laid out as an image of one size."""
        side = self._of_sound("spec_size")
        if not isinstance(side, int):
            return None
        settings = self.folder.optional("preprocessor_config.json")
        most, hop = (settings.get(name) for name in ("nb_max_samples", "hop_length"))
        if isinstance(most, int) and isinstance(hop, int) and hop > 0:
            return most // hop + 1
        return side * (side // bins)


_VISION = ("vision_config", "image_config", "backbone_config", "encoder")
_SOUND = ("audio_config", "encoder_config")
_SIDES = ("image_size", "input_size", "crop_size")
"""What configs call the height and width of an image."""


def _height_and_width(size: Any) -> tuple[int, int] | None:
    if isinstance(size, Mapping):
        names = ("height", "width") if "height" in size else ("shortest_edge", "shortest_edge")
        size = [size.get(name) for name in names]
    both = size if isinstance(size, list | tuple) else [size, size]
    if len(both) == 2 and all(isinstance(n, int) and n > 0 for n in both):
        return both[0], both[1]
    return None


def _ids(config: Mapping[Any, Any]) -> Iterator[int]:
    """Every id of a special token that a config names, those of its parts too."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _ids(value)
        elif isinstance(name, str) and "token" in name and name.endswith(("_id", "_ids", "_index")):
            values = value if isinstance(value, list) else [value]
            yield from (item for item in values if isinstance(item, int))
