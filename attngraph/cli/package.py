"""`attngraph package`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attngraph.cli.failures import reported
from attngraph.cli.flags import DebugOption, grouped
from attngraph.cli.stages import working
from attngraph.flag import Flag
from attngraph.options import Options, TargetName


@grouped
def package(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="OUT/|OUT.onnx",
            show_default=False,
            help="What optimize wrote.",
        ),
    ],
    *,
    triton: Annotated[
        Path,
        Flag("The model repository of NVIDIA Triton to put it into.", metavar="REPO"),
    ],
    name: Annotated[
        str | None,
        Flag(
            "What the model is called there, by default as the folder or the file.", metavar="NAME"
        ),
    ] = None,
    target: TargetName = "cpu",
    debug: DebugOption = False,
) -> None:
    """Put what optimize wrote where a server finds it.

    attngraph package out/ --triton models/ --name classifier
    """
    with reported(debug):
        device = Options(target).device
        with working(debug) as stages:
            stages("import torch")
            from attngraph.runtimes.triton import package as put

            made = put(source, triton, name, device)
        rows = f"batches of up to {made.rows}" if made.rows else "no batching"
        print(f"✓ {source} → {triton / made.name} ({made.backend} backend, {rows})")
