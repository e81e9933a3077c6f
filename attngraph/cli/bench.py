"""`attngraph bench`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from attngraph.cli.failures import reported
from attngraph.cli.flags import DebugOption, JsonOption, SessionFlags, grouped
from attngraph.cli.stages import working
from attngraph.errors import ParityError, UsageError
from attngraph.flag import Flag
from attngraph.frontend.files.source import Source
from attngraph.options import Options, TargetName
from attngraph.paths import require_file


@grouped
def bench(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[OUT.onnx] [MODEL]",
            show_default=False,
            help="The model, as for optimize, and the file that optimize wrote for it; without "
            "that file the model is compiled first. MODEL may be left out with --factory.",
        ),
    ] = None,
    *,
    target: TargetName = "cpu",
    precision: Annotated[Literal["fp32", "fp16", "bf16"], Flag("Of every engine.")] = "fp32",
    engines: Annotated[
        list[str] | None,
        Flag(
            "Only this engine: eager, compile, onnx, onnx-optimizer, onnx-fusions, "
            "transformers or attngraph; quantized: onnx-int8, attngraph-int8. Once for each.",
            metavar="NAME",
            name="engine",
        ),
    ] = None,
    static: Annotated[bool, Flag("Compile for the sizes of the sample inputs only.")] = False,
    rounds: Annotated[int, Flag("Blocks of each engine.", least=1)] = 7,
    seconds: Annotated[float, Flag("The length of a block.", least=0.0)] = 0.5,
    given: Source,
    session: SessionFlags,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Time a model against eager PyTorch, torch.compile and other exports to onnxruntime.

    Each engine runs in a process of its own, on the same inputs, and blocks of calls alternate. An
    engine whose outputs are out of the error budget is not timed.

    attngraph bench model.onnx model.pt2

    attngraph bench --factory examples.nanogpt:build --engine eager --engine attngraph
    """
    with reported(debug):
        onnx, model = _told_apart(files or [], given.factory)
        with working(debug) as stages:
            options = Options(target, precision, session=session.settings())
            source = replace(given, path=model)
            source.check()
            stages("import torch")
            from attngraph.cli.render import print_contest
            from attngraph.measuring.contest import hold
            from attngraph.measuring.job import Job

            job = Job(source, target, precision, static, onnx, **options.session)
            contest = hold(job, engines=engines or (), rounds=rounds, seconds=seconds)
        if as_json:
            print(json.dumps(contest.to_dict(), indent=2, allow_nan=False))
        else:
            print_contest(contest)
        ours = contest.ours
        if ours is not None and ours.status == "out of parity":
            raise ParityError(f"attngraph is out of its error budget: {ours.reason.rstrip('.')}.")


def _told_apart(files: list[Path], factory: str | None) -> tuple[Path | None, Path | None]:
    """(the ONNX file, the model's file) among the files given."""
    onnx = [path for path in files if path.suffix == ".onnx"]
    models = [path for path in files if path.suffix != ".onnx"]
    if len(onnx) > 1 or len(models) > 1:
        raise UsageError("One model is measured at a time: name one MODEL and one OUT.onnx of it.")
    for path in onnx:
        require_file(path)
    if not models and factory is None:
        after = f" that {onnx[0]} was compiled from" if onnx else ""
        raise UsageError(f"There is nothing to compare with: name the MODEL{after}, or --factory.")
    return (onnx[0] if onnx else None), (models[0] if models else None)
