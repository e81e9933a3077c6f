"""Which compiler a task's models go through, and the files that it makes.

A kind of task (attngraph/checkpoints/tasks.py) has its compiler in COMPILERS: a function from a
`Request` to `Parts`. It saves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from attngraph.checkpoints.tasks import Kind
from attngraph.compiling.compiler import compile_model
from attngraph.decoding.compile import compile_decoder, of_causal_lm
from attngraph.decoding.compile_multimodal import compile_multimodal
from attngraph.decoding.compile_seq2seq import compile_seq2seq, rules_of
from attngraph.decoding.rules import NO_RULES
from attngraph.decoding.seq2seq import ENCODER
from attngraph.deployment.folder import Place
from attngraph.errors import CaptureError, SampleError, UsageError
from attngraph.export.files.staged import Staged
from attngraph.frontend.families.multimodal import of_images
from attngraph.frontend.families.seq2seq import is_seq2seq, of_transformers
from attngraph.frontend.files.load import EMBEDDED, Loaded
from attngraph.frontend.interface.modalities import SOUND, SOUNDS, joined_by, refuse_mixed
from attngraph.frontend.model import Model
from attngraph.frontend.tracing.trace_errors import Specialised
from attngraph.options import DecoderOptions, Options
from attngraph.reports.report import Report
from attngraph.runtimes.genai import CONFIG, Generation, genai_config, notes_of

MODEL = "model.onnx"


class Part(Protocol):
    """One ONNX file, compiled and not saved yet."""

    @property
    def report(self) -> Report: ...

    def save(self, path: str | Path) -> None: ...


@dataclass(frozen=True)
class Request:
    """What is compiled, and how. `place` is where it will be saved."""

    loaded: Loaded
    model: Callable[[], Model]
    options: Options
    decoding: DecoderOptions
    place: Place | None = None

    def staged(self, name: str) -> Staged | None:
        """Where large weights of this file are put before it is saved."""
        return None if self.place is None else self.place.staged(name)


@dataclass(frozen=True)
class Parts:
    """What to call, the ONNX files by the names that optimum gives them, texts beside them, and the
    `settings` that config.json has otherwise than that of the checkpoint.
    """

    result: Any
    files: Mapping[str, Part]
    texts: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def compiled(request: Request) -> Parts:
    """Compiles a checkpoint as its task wants it. Raises UsageError where no compiler is for it."""
    task = request.loaded.task
    kind: Kind = "model" if task is None else task.kind
    if kind == "model" and request.decoding != DecoderOptions():
        raise UsageError(
            f"{request.loaded.source} is no causal language model, so it has no cache: leave out "
            f"the options of decoding{_or_as_decoder(request.loaded)}."
        )
    if kind == "decoder" and request.loaded.args is None:
        raise UsageError(
            f"{request.loaded.source} is a causal language model of transformers, whose inputs are "
            "made here: leave out --input and --inputs."
        )
    return replace(COMPILERS[kind](request), settings=request.loaded.settings)


def _or_as_decoder(loaded: Loaded) -> str:
    """The end of an advice for a model of embeddings that was saved as a language model."""
    told = any(EMBEDDED in note for note in loaded.notes)
    return ", or pass --task text-generation to have its decoder" if told else ""


def _whole(request: Request) -> Parts:
    """One graph of the model's forward."""
    try:
        optimized = compile_model(
            request.model(),
            request.options,
            staged=request.staged(MODEL),
        )
    except SampleError as error:
        made = {n: e for n, e in (request.loaded.kwargs or {}).items() if isinstance(e, Tensor)}
        if not made:
            raise
        shown = ", ".join(f"{name} {tuple(each.shape)}" for name, each in made.items())
        raise SampleError(
            f"{error} The samples follow from its config and that of its preprocessor: {shown}. If "
            "it takes others, describe each input with --input."
        ) from error
    return Parts(optimized, {MODEL: optimized})


def _decoder(request: Request) -> Parts:
    """A causal language model of transformers with its cache."""
    loaded = request.loaded
    model = Model(loaded.module, None, (), {}, None, loaded.source, notes=loaded.notes)
    return as_decoder(request, of_causal_lm(model, request.decoding))


def as_decoder(request: Request, model: Model) -> Parts:
    """A model whose inputs hold its cache, and what its runtime reads beside it."""
    decoder = compile_decoder(
        model,
        request.decoding,
        request.options,
        staged=request.staged(MODEL),
    )
    rules = rules_of(request.loaded.module)
    if rules != NO_RULES:
        decoder.keep_rules(rules)
        decoder.report.notes += rules.notes
    if request.decoding.runtime is None:
        return Parts(decoder, {MODEL: decoder})
    told = Generation.of(request.loaded.module)
    file = MODEL if request.place is None else request.place.name_of(MODEL)
    config = genai_config(decoder, told, file=file)
    decoder.report.notes += notes_of(decoder, told)
    return Parts(decoder, {MODEL: decoder}, {CONFIG: json.dumps(config, indent=2)})


def _seq2seq(request: Request) -> Parts:
    """An encoder and a decoder that attends to it, alone and with the first step."""
    loaded = request.loaded
    _require_plain(request, "an encoder-decoder", ENCODER)
    assert loaded.module is not None
    if not is_seq2seq(loaded.module):
        name = type(loaded.module).__name__
        raise UsageError(f"{name} of {loaded.source} is no encoder-decoder with a decoder of text.")
    parts = of_transformers(loaded.module, None, None, loaded.source)
    try:
        return _of_parts(compile_seq2seq, parts, request)
    except CaptureError as error:
        lengths = [
            axis for axes in parts.encoder.dynamic_shapes["source"].values() for axis in axes
        ]
        if not any(lengths) or not _is_of(error, parts.encoder):
            raise
        cause = error.cause if isinstance(error, Specialised) else str(error)
        raise CaptureError(
            f"{cause} What it encodes can't have any length: give attngraph.optimize_seq2seq "
            "samples of one length as source, and source_shapes without that axis."
        ) from error


def _is_of(error: CaptureError, part: Model) -> bool:
    """Whether it was this part that couldn't be captured, whose inputs begin with a dict."""
    if isinstance(error, Specialised):
        return any(request.input.startswith("source[") for request in error.requests)
    return f"trace {type(part.module).__name__} " in str(error)


def _multimodal(request: Request) -> Parts:
    """What is seen, what is read, the rule that joins them, and a decoder of embeddings."""
    loaded = request.loaded
    assert loaded.module is not None
    kinds = joined_by(type(loaded.module))
    if not kinds:
        refuse_mixed(type(loaded.module), loaded.source)
    what = " and ".join(each.what for each in kinds)
    _require_plain(request, f"a model that reads {what}", kinds[0].encoder)
    parts = of_images(loaded.module, None, None, loaded.source)
    try:
        return _of_parts(compile_multimodal, parts, request)
    except CaptureError as error:
        if kinds != (SOUND,) or "frames" not in str(parts.first.vision.dynamic_shapes):
            raise
        raise CaptureError(
            f"{error} Its sounds can't have any length: give attngraph.optimize_multimodal samples "
            f"of yours, as images={{{SOUNDS!r}: tensor}} with image_shapes."
        ) from error


def _require_plain(request: Request, kind: str, file: str) -> None:
    """Raises UsageError for options, or a place, that a model of several files can't have."""
    source, place, decoding = request.loaded.source, request.place, request.decoding
    if decoding.gives_all_logits or decoding.position_ids or not decoding.padding:
        raise UsageError(
            f"{source} is {kind}, whose files are the same for each runtime: leave out --for, "
            "--all-logits, --no-padding and --position-ids."
        )
    if place is not None and place.name_of(file) != file:
        raise UsageError(f"{source} is {kind}, which becomes several files: give -o a folder.")


def _of_parts(compiler: Callable[..., Any], parts: Any, request: Request) -> Parts:
    assert request.loaded.module is not None
    found = compiler(
        parts,
        rules_of(request.loaded.module),
        request.decoding,
        request.options,
        staged=request.staged,
    )
    files = found.files
    next(iter(files.values())).report.notes += request.loaded.notes
    return Parts(found, files)


COMPILERS: dict[Kind, Callable[[Request], Parts]] = {
    "model": _whole,
    "decoder": _decoder,
    "seq2seq": _seq2seq,
    "multimodal": _multimodal,
}
