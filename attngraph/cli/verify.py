"""`attngraph verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from attngraph.cli.failures import reported
from attngraph.cli.options import (
    DebugOption,
    DimOption,
    FactoryOption,
    InputOption,
    JsonOption,
    NpzOption,
    ProviderOption,
    Source,
    SpinningOption,
    TargetOption,
    ThreadsOption,
    TrustOption,
    session_settings,
)
from attngraph.cli.stages import working
from attngraph.errors import ParityError, UsageError


def verify(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL OUT.onnx",
            show_default=False,
            help="The model, as for optimize, and the ONNX file. With --factory the model may be "
            "left out.",
        ),
    ],
    target: TargetOption = "cpu",
    factory: FactoryOption = None,
    trust_pickle: TrustOption = False,
    inputs: InputOption = None,
    npz: NpzOption = None,
    dims: DimOption = None,
    threads: ThreadsOption = None,
    spinning: SpinningOption = True,
    provider_options: ProviderOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare an ONNX file with a model: is each output within the error budget?

    Any file with the model's inputs and outputs, by name or in their order. Where one that
    attngraph made is out of its budget, the first node that diverges is named. The exit code is
    then 8.

    attngraph verify model.pt2 model.onnx
    """
    with reported(debug):
        with working(debug) as stages:
            *models, path = files
            if len(models) > 1 or not (models or factory):
                raise UsageError(
                    "verify takes a model and an ONNX file: attngraph verify MODEL OUT.onnx, or "
                    "with --factory the ONNX file alone."
                )
            stages("import torch")
            from attngraph.cli.work import verified

            model = models[0] if models else None
            source = Source.of(model, factory, trust_pickle, inputs, npz, dims)
            session = session_settings(threads, spinning, provider_options)
            found = verified(source, path, target=target, session=session, stages=stages)
        if as_json:
            print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
        else:
            from attngraph.cli.render import print_verification

            print_verification(found)
        if not found.parity.passed:
            raise typer.Exit(ParityError.exit_code)
