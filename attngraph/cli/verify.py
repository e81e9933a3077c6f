"""`attngraph verify`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from attngraph.cli.failures import reported
from attngraph.cli.flags import DebugOption, JsonOption, SessionFlags, grouped
from attngraph.cli.stages import working
from attngraph.errors import ParityError, UsageError
from attngraph.frontend.files.source import Source
from attngraph.options import Options, TargetName
from attngraph.paths import require_file


@grouped
def verify(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL OUT.onnx|OUT/",
            show_default=False,
            help="The model, as for optimize, and the ONNX file, or the folder optimize wrote. "
            "With --factory the model may be left out.",
        ),
    ],
    *,
    target: TargetName = "cpu",
    given: Source,
    session: SessionFlags,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare an ONNX file with a model: is each output within the error budget?

    Any file with the model's inputs and outputs, by name or in their order. Where one that
    attngraph made is out of its budget, the first node that diverges is named. The exit code is
    then 8.

    attngraph verify model.pt2 model.onnx

    attngraph verify checkpoint/ out/
    """
    with reported(debug):
        with working(debug) as stages:
            *models, path = files
            if len(models) > 1 or not (models or given.factory):
                raise UsageError(
                    "verify takes a model and an ONNX file: attngraph verify MODEL OUT.onnx, or "
                    "with --factory the ONNX file alone."
                )
            options = Options(target, session=session.settings())
            if not os.path.isdir(path):
                require_file(path)
            source = replace(given, path=models[0] if models else None)
            source.check()
            stages("import torch")
            from attngraph.cli.render import print_verification
            from attngraph.cli.work import verified

            found = verified(source, path, options)
        if as_json:
            told = [each.to_dict() for each in found]
            print(json.dumps(told[0] if len(told) == 1 else told, indent=2, allow_nan=False))
        else:
            for each in found:
                print_verification(each)
        if not all(each.passed for each in found):
            raise typer.Exit(ParityError.exit_code)
