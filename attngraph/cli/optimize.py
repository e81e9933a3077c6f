"""`attngraph optimize`."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
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
    SourceFlags,
    grouped,
    pairs,
    switch,
)
from attngraph.cli.output import check_output, write_page, written_bytes
from attngraph.cli.stages import working
from attngraph.deployment.kept import require_folder
from attngraph.errors import UsageError
from attngraph.options import CacheKind, DecoderOptions, Options, Runtime, check_runtime

_DECODING = "Decoding"


@dataclass(frozen=True)
class _DecoderFlags:
    """Whether the model is compiled with its cache, and how."""

    decode: Annotated[
        bool,
        switch(
            "--decode",
            rich_help_panel=_DECODING,
            help="Compile a causal language model with its key-value cache: one graph for the "
            "prompt and for each token after it, which attngraph.Decoder runs.",
        ),
    ] = False
    cache: Annotated[
        CacheKind,
        typer.Option(
            "--cache",
            rich_help_panel=_DECODING,
            help="growing: each step gives a cache that is longer, and leaves the old one. static: "
            "buffers of --max-length tokens, which a step writes into where they lie.",
        ),
    ] = "growing"
    max_length: Annotated[
        int | None,
        typer.Option(
            "--max-length",
            metavar="TOKENS",
            show_default=False,
            rich_help_panel=_DECODING,
            help="The tokens, of prompt and continuation, that a static cache has room for.",
        ),
    ] = None
    present: Annotated[
        list[str] | None,
        typer.Option(
            "--present",
            metavar="PAST=PRESENT",
            show_default=False,
            rich_help_panel=_DECODING,
            help="An input with keys or values, and the output that takes its place at the next "
            "step. Where it isn't plain; once for each past.",
        ),
    ] = None
    all_logits: Annotated[
        bool,
        switch(
            "--all-logits",
            rich_help_panel=_DECODING,
            help="The logits of every position, not of the last alone (models of transformers).",
        ),
    ] = False
    no_padding: Annotated[
        bool,
        switch(
            "--no-padding",
            rich_help_panel=_DECODING,
            help="No row will be padded, so the graph takes no mask, which leaves faster kernels "
            "to a step on CUDA (models of transformers).",
        ),
    ] = False
    position_ids: Annotated[
        bool,
        switch(
            "--position-ids",
            rich_help_panel=_DECODING,
            help="Positions as an input, for a caller with other ones than the mask says (models "
            "of transformers).",
        ),
    ] = False

    runtime: Annotated[
        Runtime | None,
        typer.Option(
            "--for",
            show_default=False,
            rich_help_panel=_DECODING,
            help="The runtime that will generate. genai: write genai_config.json beside the file, "
            "and give all logits.",
        ),
    ] = None

    def options(self, *, may_decode: bool) -> DecoderOptions | None:
        """None without --decode, unless the model itself says whether it is a decoder.

        Raises UsageError for flags that don't go together.
        """
        presents = pairs(self.present or (), "--present", "PAST=PRESENT", "past_key=present_key")
        if self.runtime is not None and self.no_padding:
            raise UsageError(
                f"--for {self.runtime} needs the mask that --no-padding leaves out: drop one."
            )
        if self.position_ids and self.no_padding:
            raise UsageError(
                "--position-ids goes with the mask that --no-padding leaves out: drop one."
            )
        if self.decode or may_decode:
            return DecoderOptions(self.cache, self.max_length, presents or None, self.position_ids)
        if self != _DecoderFlags():
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
    decoding: _DecoderFlags,
    report_page: ReportOption = None,
    given: SourceFlags,
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
            source = given.of(model)
            makes_folder = (source.is_folder or decoding.decode) and output.suffix != ".onnx"
            if not makes_folder:
                check_output(output, (model, given.npz))
            if report_page is not None:
                check_output(report_page, (model, given.npz, output))
            options = how(session=session.settings())
            check_runtime(decoding.runtime, options)
            decoder = decoding.options(may_decode=source.is_folder)
            if decoding.decode and options.ignore_padded_rows:
                raise UsageError("--ignore-padded-rows is for encoders; leave out --decode.")
            source.check()
            checkpoint = source.path if source.is_folder else None
            if makes_folder:
                require_folder(output, checkpoint)
            if decoding.runtime is not None and source.is_folder and model is not None:
                require_tokenizer(model, decoding.runtime)
            stages("import torch")
            from attngraph.cli import work
            from attngraph.cli.render import print_summary
            from attngraph.cli.report_page import page_of
            from attngraph.deployment.folder import folder_bytes, place_of

            place = place_of(output, checkpoint, parts=decoding.decode)
            held.enter_context(place)
            parts = work.compiled_parts(
                source,
                options,
                decoder,
                all_logits=decoding.all_logits,
                padding=not decoding.no_padding,
                stages=stages,
                runtime=decoding.runtime,
                place=place,
            )
            stages("save")
            start = time.perf_counter()
            place.write(parts.files, parts.texts)
        report = next(iter(parts.files.values())).report
        report.timings = {"import": stages.seconds("import torch"), **report.timings}
        report.timings["save"] = time.perf_counter() - start
        is_folder = output.is_dir()
        size = folder_bytes(output) if is_folder else written_bytes(output, report.weight_bytes)
        written: dict[str, str | int] = {"path": str(output), "bytes": size}
        if report_page is not None:
            write_page(report_page, page_of(report, written, work.drawn(parts)))
        if as_json:
            print(json.dumps({**report.to_dict(), "output": written}, indent=2, allow_nan=False))
        else:
            print_summary(report, output, size)
