"""The work of the commands: a model compiled, analysed or verified. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from attngraph.checkpoints.tasks import Kind
from attngraph.checks.branches import followed
from attngraph.cli.report_page import Drawn, Shown
from attngraph.compiling.compiler import analyse, compile_model
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.multimodal import ENCODERS
from attngraph.decoding.seq2seq import DECODER, ENCODER, MERGED
from attngraph.deployment.checkpoint import checkpoint_of
from attngraph.deployment.compilers import COMPILERS, MODEL, Parts, Request, as_decoder
from attngraph.deployment.folder import Place
from attngraph.errors import UsageError
from attngraph.export.runtime.session import Session
from attngraph.frontend.families.cache import METADATA_KEY
from attngraph.frontend.families.causal_lm import is_causal_lm
from attngraph.frontend.families.seq2seq import is_seq2seq
from attngraph.frontend.files.factory import importable_cwd
from attngraph.frontend.files.source import Source
from attngraph.frontend.interface.modalities import is_multimodal
from attngraph.frontend.model import Model
from attngraph.frontend.read_source import load_source, model_of, parsed, read_model
from attngraph.optimized import Optimized
from attngraph.options import DecoderOptions, Options
from attngraph.paths import require_file
from attngraph.reports.attention_weights import AttentionWeights, hidden_in_loops
from attngraph.reports.pictures import pictures, weights_of
from attngraph.reports.report import Report
from attngraph.stages import begins
from attngraph.verification.verify import Verification, verify_file
from attngraph.verification.verify_parts import verify_multimodal, verify_seq2seq


def compiled_parts(
    source: Source,
    options: Options,
    decoding: DecoderOptions | None,
    *,
    place: Place,
) -> Parts:
    """The model compiled and checked, but not saved: the files that it becomes.

    Without `decoding` it is no decoder; a checkpoint's folder says by itself what it is.
    """
    with importable_cwd():  # a user's module may import others as late as in forward
        if source.is_folder:
            assert decoding is not None
            return checkpoint_of(source, options, decoding, place=place).parts
        if decoding is not None:
            return _with_cache(source, options, decoding, place=place)
        model, seconds = _timed_model(source)
        result = compile_model(model, options, staged=place.staged(MODEL))
    result.report.timings = {"load": seconds, **result.report.timings}
    return Parts(result, {MODEL: result})


def _with_cache(
    source: Source, options: Options, decoding: DecoderOptions, *, place: Place
) -> Parts:
    """The model as a decoder, or as the parts of one that has several; checked but not saved."""
    given = parsed(source)
    begins("load")
    start = time.perf_counter()
    loaded = load_source(source)
    request = Request(loaded, lambda: model_of(loaded, source, given), options, decoding, place)
    kind = next((name for name, is_one in _OF_TRANSFORMERS.items() if is_one(loaded.module)), None)
    seconds = time.perf_counter() - start
    if kind is not None:
        samples = source.inputs or source.npz or source.dims or decoding.presents
        if samples or (kind != "decoder" and loaded.args is not None):
            raise UsageError(
                f"{loaded.source} is a model of transformers, whose inputs --decode makes itself: "
                "leave out --input, --inputs, --dim and --present, and samples in the factory."
            )
        found = COMPILERS[kind](request)
    elif decoding.all_logits or decoding.position_ids or not decoding.padding:
        raise UsageError(
            f"{loaded.source} is no causal language model of transformers: it takes the inputs "
            "and returns the logits that it does; leave out --all-logits, --no-padding "
            "and --position-ids."
        )
    else:
        found = as_decoder(request, request.model())
    report = next(iter(found.files.values())).report
    report.timings = {"load": seconds, **report.timings}
    return found


_OF_TRANSFORMERS: dict[Kind, Callable[[torch.nn.Module | None], bool]] = {
    "seq2seq": is_seq2seq,
    "multimodal": is_multimodal,
    "decoder": is_causal_lm,
}


def analysed(source: Source, options: Options, *, draws: bool = False) -> tuple[Drawn, Report]:
    """The attention sites of the model, with their pictures where it `draws`."""
    with importable_cwd():
        model, seconds = _timed_model(source)
        graph, report = analyse(model, options)
        origin = followed(model).graph if draws else None
    report.timings = {"load": seconds, **report.timings}
    return Drawn(pictures(report.sites, graph, origin, None) if draws else {}), report


def shown(parts: Parts, places: Mapping[str, tuple[Path, int]]) -> list[Shown]:
    """What a page shows of files, by where they were written and how many bytes they have."""
    found: list[Shown] = []
    for name, (path, size) in places.items():
        part = parts.files[name]
        made = part.optimized if isinstance(part, Decoder) else part
        drawn = Drawn()
        if isinstance(made, Optimized):
            images = pictures(made.report.sites, made.graph, made.origin, made.model)
            drawn = Drawn(images, weights_of(made.model))
        found.append((part.report, {"path": str(path), "bytes": size}, drawn))
    return found


def verified(source: Source, path: Path, options: Options) -> list[Verification]:
    """The file at `path`, or each file of an encoder-decoder's folder, compared with the model."""
    given, is_folder = parsed(source), path.is_dir()
    has_parts = any((path / name).exists() for name in (ENCODER, *ENCODERS))
    path = path / MODEL if is_folder and not has_parts else path
    if not path.is_dir():
        require_file(path)
        with Session.open(path, options.device, **options.session) as opened, importable_cwd():
            begins("load")
            loaded = load_source(source)
            if METADATA_KEY in opened.metadata and is_causal_lm(loaded.module):
                model = Model.of_module(loaded.module, source=loaded.source)
            elif path.name in (ENCODER, DECODER, MERGED) and is_seq2seq(loaded.module):
                raise UsageError(f"{path} is a part of {loaded.source}: give its folder.")
            else:
                model = model_of(loaded, source, given)
            return [verify_file(model, path, opened, options)]
    with importable_cwd():
        begins("load")
        loaded = load_source(source, samples=False)
        if loaded.module is not None and is_multimodal(loaded.module):
            return verify_multimodal(loaded.module, loaded.source, path, options)
        if loaded.module is None or not is_seq2seq(loaded.module):
            raise UsageError(
                f"{path} holds an encoder and a decoder, and {loaded.source} is no model of "
                "transformers that has both: name one of its files."
            )
        return verify_seq2seq(loaded.module, loaded.source, path, options)


def attended(
    source: Source,
    options: Options,
    *,
    layers: tuple[int, ...] | None,
    heads: tuple[int, ...] | None,
) -> tuple[str, list[AttentionWeights], list[str]]:
    """(the model's name, its attentions' weights, notes on what is left out)."""
    with importable_cwd():
        model, _ = _timed_model(source)
        result = compile_model(model, options)
        begins("attention")
        tensors = pytree.tree_leaves((model.args, dict(model.kwargs)))
        given = [leaf for leaf in tensors if isinstance(leaf, torch.Tensor)]
        views = result.attention(*given, layers=layers, heads=heads)
        return model.source, views, hidden_in_loops(result.graph)


def _timed_model(source: Source) -> tuple[Model, float]:
    begins("load")
    start = time.perf_counter()
    return read_model(source), time.perf_counter() - start
