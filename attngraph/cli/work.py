"""The work of the commands: a model compiled, analysed or verified. Imports torch."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from attngraph.cli.stages import Stages
from attngraph.compiling.compiler import analyse, compile_model
from attngraph.decoding.compile import compile_decoder, of_causal_lm
from attngraph.decoding.decoder import Decoder
from attngraph.deployment.checkpoint import checkpoint_of
from attngraph.deployment.compilers import MODEL, Parts
from attngraph.deployment.folder import Place
from attngraph.errors import UsageError
from attngraph.export.files.staged import Staged
from attngraph.export.runtime.session import Session
from attngraph.frontend.cache import METADATA_KEY
from attngraph.frontend.causal_lm import is_causal_lm
from attngraph.frontend.factory import importable_cwd
from attngraph.frontend.model import Model
from attngraph.frontend.read_source import load_source, model_of, parsed, read_model
from attngraph.frontend.source import Source
from attngraph.optimized import Optimized
from attngraph.options import DecoderOptions, Options, Runtime
from attngraph.reports.attention_weights import AttentionWeights, hidden_in_loops
from attngraph.reports.report import Report
from attngraph.runtimes.genai import CONFIG, Generation, genai_config, notes_of
from attngraph.verification.verify import Verification, verify_file


def compiled_parts(
    source: Source,
    options: Options,
    decoding: DecoderOptions | None,
    *,
    all_logits: bool,
    padding: bool,
    runtime: Runtime | None,
    stages: Stages,
    place: Place,
) -> Parts:
    """The model compiled and checked, but not saved: the files that it becomes.

    Without `decoding` it is no decoder; a checkpoint's folder says by itself what it is.
    """
    if source.is_folder:
        assert decoding is not None
        with importable_cwd():
            made = checkpoint_of(
                source,
                options,
                decoding,
                all_logits=all_logits,
                padding=padding,
                runtime=runtime,
                place=place,
                progress=stages,
            )
        return made.parts
    if decoding is None:
        optimized = optimised(source, options, stages=stages, staged=place.staged(MODEL))
        return Parts(optimized, {MODEL: optimized})
    made_decoder, beside = decoder(
        source,
        options,
        decoding,
        all_logits=all_logits,
        padding=padding,
        runtime=None if runtime is None else (runtime, place.name_of(MODEL)),
        stages=stages,
        staged=place.staged(MODEL),
    )
    return Parts(made_decoder, {MODEL: made_decoder}, beside)


def optimised(source: Source, options: Options, *, stages: Stages, staged: Staged) -> Optimized:
    """The model compiled and checked, but not saved."""
    with importable_cwd():  # a user's module may import others as late as in forward
        model, seconds = _timed_model(source, stages)
        result = compile_model(model, options, staged=staged, progress=stages)
    result.report.timings = {"load": seconds, **result.report.timings}
    return result


def decoder(
    source: Source,
    options: Options,
    decoding: DecoderOptions,
    *,
    all_logits: bool,
    padding: bool,
    runtime: tuple[Runtime, str] | None,
    stages: Stages,
    staged: Staged,
) -> tuple[Decoder, dict[str, str]]:
    """The model as a decoder, checked but not saved, and the files to lie beside it.

    `runtime` is who will run it, and under which name they find it.
    """
    given = parsed(source)
    with importable_cwd():
        stages("load")
        start = time.perf_counter()
        loaded = load_source(source)
        if is_causal_lm(loaded.module):
            if source.inputs or source.npz or source.dims or decoding.presents:
                raise UsageError(
                    f"{loaded.source} is a model of transformers, whose inputs --decode makes "
                    "itself: leave out --input, --inputs, --dim and --present."
                )
            model = Model(loaded.module, None, (), {}, None, loaded.source, notes=loaded.notes)
            every = all_logits or runtime is not None
            model = of_causal_lm(model, all_logits=every, padding=padding)
        elif all_logits or not padding:
            raise UsageError(
                f"{loaded.source} is no causal language model of transformers: it takes the inputs "
                "and returns the logits that it does; leave out --all-logits and --no-padding."
            )
        else:
            model = model_of(loaded, source, given)
        seconds = time.perf_counter() - start
        result = compile_decoder(model, decoding, options, staged=staged, progress=stages)
    result.report.timings = {"load": seconds, **result.report.timings}
    if runtime is None:
        return result, {}
    told = Generation.of(loaded.module)
    config = genai_config(result, told, file=runtime[1])
    result.report.notes += notes_of(result, told)
    return result, {CONFIG: json.dumps(config, indent=2)}


def analysed(source: Source, options: Options, *, stages: Stages) -> Report:
    """The attention sites of the model."""
    with importable_cwd():
        model, seconds = _timed_model(source, stages)
        _, report = analyse(model, options, progress=stages)
    report.timings = {"load": seconds, **report.timings}
    return report


def verified(source: Source, path: Path, options: Options, *, stages: Stages) -> Verification:
    """The file at `path` compared with the model."""
    with Session.open(path, options.device, **options.session) as opened, importable_cwd():
        stages("load")
        given = parsed(source)
        loaded = load_source(source)
        if METADATA_KEY in opened.metadata and is_causal_lm(loaded.module):
            model = Model(loaded.module, None, (), {}, None, loaded.source)
        else:
            model = model_of(loaded, source, given)
        return verify_file(model, path, opened, options, progress=stages)


def attended(
    source: Source,
    options: Options,
    *,
    layers: tuple[int, ...] | None,
    heads: tuple[int, ...] | None,
    stages: Stages,
) -> tuple[str, list[AttentionWeights], list[str]]:
    """(the model's name, its attentions' weights, notes on what is left out)."""
    with importable_cwd():
        model, _ = _timed_model(source, stages)
        result = compile_model(model, options, progress=stages)
        stages("attention")
        tensors = pytree.tree_leaves((model.args, dict(model.kwargs)))
        given = [leaf for leaf in tensors if isinstance(leaf, torch.Tensor)]
        views = result.attention(*given, layers=layers, heads=heads)
        return model.source, views, hidden_in_loops(result.graph)


def _timed_model(source: Source, stages: Stages) -> tuple[Model, float]:
    stages("load")
    start = time.perf_counter()
    return read_model(source), time.perf_counter() - start
