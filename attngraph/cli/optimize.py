"""`attngraph optimize`."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from attngraph.checkpoints.folder import require_tokenizer
from attngraph.cli.failures import reported
from attngraph.cli.flags import (
    DebugOption,
    JsonOption,
    ModelArgument,
    ReportOption,
    SessionFlags,
    grouped,
    pairs,
)
from attngraph.cli.output import check_output, write_page, written_bytes
from attngraph.cli.stages import working
from attngraph.deployment.kept import require_folder
from attngraph.errors import UsageError
from attngraph.flag import Flag
from attngraph.frontend.files.source import Source
from attngraph.options import DECODING, DecoderOptions, Options


@dataclass(frozen=True)
class _CacheFlags:
    """Whether the model is compiled with its cache, and how its cache is handed on."""

    decode: Annotated[
        bool,
        Flag(
            "Compile a causal language model with its key-value cache: one graph for the "
            "prompt and for each token after it, which attngraph.Decoder runs.",
            panel=DECODING,
        ),
    ] = False
    present: Annotated[
        list[str] | None,
        Flag(
            "An input with keys or values, and the output that takes its place at the next "
            "step. Where it isn't plain; once for each past.",
            metavar="PAST=PRESENT",
            panel=DECODING,
        ),
    ] = None

    def options(
        self, decoding: partial[DecoderOptions], *, may_decode: bool
    ) -> DecoderOptions | None:
        """The options of a decoder; None without --decode, unless the model says whether it is one.

        Raises UsageError for flags that don't go together.
        """
        presents = pairs(self.present or (), "--present", "PAST=PRESENT", "past_key=present_key")
        if self.decode or may_decode:
            return decoding(presents=presents or None)
        given = {**decoding.keywords, "presents": presents or None}
        if any(given[item.name] != item.default for item in fields(DecoderOptions)):
            raise UsageError(
                "--cache, --max-length, --present, --all-logits, --no-padding, --position-ids and "
                "--for are for --decode; add it."
            )
        return None


@grouped
def optimize(
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT.onnx|OUT/",
            help="The file to write; of a checkpoint's folder, or with --decode, a folder unless "
            "it ends in .onnx.",
            show_default=False,
        ),
    ],
    model: ModelArgument = None,
    *,
    how: partial[Options],
    caching: _CacheFlags,
    decoding: partial[DecoderOptions],
    report_page: ReportOption = None,
    given: Source,
    session: SessionFlags,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compile a model to ONNX, check it against the eager model, and write it.

    attngraph optimize checkpoint/ -o out/

    attngraph optimize model.pt2 -o model.onnx

    attngraph optimize --factory examples.nanogpt:build -o model.onnx

    attngraph optimize --factory examples.cached_gpt:build --decode -o model.onnx

    attngraph optimize weights.safetensors --factory my.model:build -o model.onnx
    --input "input_ids=int64\\[batch=2,seq=8]" --dim seq=2..2048
    """
    with reported(debug):
        with contextlib.ExitStack() as held:
            stages = held.enter_context(working(debug))
            source = replace(given, path=model)
            makes_folder = (source.is_folder or caching.decode) and output.suffix != ".onnx"
            if not makes_folder:
                check_output(output, (model, given.npz))
            if report_page is not None:
                check_output(report_page, (model, given.npz, output))
            options = how(session=session.settings())
            decoder = caching.options(decoding, may_decode=source.is_folder)
            if decoder is not None:
                decoder.check_with(options)
            if caching.decode and options.ignore_padded_rows:
                raise UsageError("--ignore-padded-rows is for encoders; leave out --decode.")
            source.check()
            checkpoint = source.path if source.is_folder else None
            if makes_folder:
                require_folder(output, checkpoint)
            if decoder is not None and decoder.runtime and checkpoint is not None:
                require_tokenizer(checkpoint, decoder.runtime)
            stages("import torch")
            from attngraph.cli import work
            from attngraph.cli.render import print_summary
            from attngraph.cli.report_page import page_of_parts
            from attngraph.deployment.folder import folder_bytes, place_of

            place = place_of(output, checkpoint, parts=caching.decode)
            held.enter_context(place)
            parts = work.compiled_parts(source, options, decoder, place=place)
            stages("save")
            start = time.perf_counter()
            place.write(parts.files, parts.texts, parts.settings)
        reports = {name: part.report for name, part in parts.files.items()}
        report = next(iter(reports.values()))
        report.timings = {"import": stages.seconds("import torch"), **report.timings}
        report.timings["save"] = time.perf_counter() - start
        is_folder = output.is_dir()
        size = folder_bytes(output) if is_folder else written_bytes(output, report.weight_bytes)
        places = {next(iter(reports)): (output, size)}
        if len(reports) > 1:  # each of the files has its own attentions, parity and notes
            places = {
                name: (output / name, written_bytes(output / name, each.weight_bytes))
                for name, each in reports.items()
            }
        if report_page is not None:
            write_page(report_page, page_of_parts(work.shown(parts, places)))
        if as_json:
            told = {**report.to_dict(), "output": {"path": str(output), "bytes": size}}
            if len(reports) > 1:
                told["files"] = {name: each.to_dict() for name, each in reports.items()}
            print(json.dumps(told, indent=2, allow_nan=False))
        else:
            for name, (path, bytes_) in places.items():
                print_summary(reports[name], path, bytes_)
