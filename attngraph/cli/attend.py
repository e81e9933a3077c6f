"""`attngraph attend`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngraph.cli.failures import reported
from attngraph.cli.flags import DebugOption, JsonOption, ModelArgument, SessionFlags, grouped
from attngraph.cli.output import check_output, write_page
from attngraph.cli.stages import working
from attngraph.errors import UsageError
from attngraph.flag import Flag
from attngraph.frontend.files.source import Source
from attngraph.options import Options, TargetName

if TYPE_CHECKING:
    from attngraph.reports.attention_weights import AttentionWeights

_SHOWN = "What to show"


@dataclass(frozen=True)
class _ShownFlags:
    """What the page shows."""

    layers: Annotated[
        str | None,
        Flag(
            "The attentions to show, by their number in the model; all where left out.",
            metavar="0,1,…",
            panel=_SHOWN,
        ),
    ] = None
    heads: Annotated[
        str | None,
        Flag("The heads to show; all where left out.", metavar="0,1,…", panel=_SHOWN),
    ] = None
    tokens: Annotated[
        str | None,
        Flag(
            "Labels of the keys, and of the queries where there are as many.",
            metavar='"the cat sat"',
            panel=_SHOWN,
        ),
    ] = None
    query_tokens: Annotated[
        str | None,
        Flag(
            "Labels of the queries, where they are not the keys.", metavar='"le chat"', panel=_SHOWN
        ),
    ] = None
    element: Annotated[
        int,
        Flag("The element of the batch to show.", panel=_SHOWN, least=0),
    ] = 0


@grouped
def attend(
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="OUT.html", help="The page to write.", show_default=False
        ),
    ],
    model: ModelArgument = None,
    *,
    shown: _ShownFlags,
    target: TargetName = "cpu",
    given: Source,
    session: SessionFlags,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Draw what a model's attentions look at: heat maps on one HTML page.

    The model is optimised, its attention weights become outputs, and they are compared with eager
    PyTorch's on the same inputs before they are drawn.

    attngraph attend model.pt2 --inputs sentence.npz --tokens "the cat sat" -o attention.html
    """
    with reported(debug):
        with working(debug) as stages:
            check_output(output, (model, given.npz))
            layers = _numbers(shown.layers, "--layers")
            heads = _numbers(shown.heads, "--heads")
            options = Options(target, session=session.settings())
            source = replace(given, path=model)
            source.check()
            stages("import torch")
            from attngraph.cli.work import attended
            from attngraph.reports.heat_map import attention_page

            name, views, left_out = attended(source, options, layers=layers, heads=heads)
            keys, queries = _words(shown.tokens), _words(shown.query_tokens or shown.tokens)
            _check_tokens(views, keys, queries if shown.query_tokens else None, shown.element)
            page = attention_page(name, views, queries, keys, shown.element, left_out)
            write_page(output, page)
        if as_json:
            told = {"attention": _as_dicts(views), "notes": left_out, "output": str(output)}
            print(json.dumps(told, indent=2))
            return
        for view in views:
            checked = "as eager's" if view.checked else "not compared with eager's"
            print(f"{view}: weights {tuple(view.weights.shape)}, {checked}")
        for note in left_out:
            print(f"note: {note}")
        print(f"written to {output}")


def _as_dicts(views: Sequence[AttentionWeights]) -> list[dict[str, Any]]:
    return [
        {
            "layer": view.layer,
            "module": view.module,
            "location": view.location,
            "heads": list(view.heads),
            "shape": list(view.weights.shape),
            "checked": view.checked,
        }
        for view in views
    ]


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is no list of numbers such as 0,2.") from error


def _words(text: str | None) -> list[str] | None:
    return None if text is None else text.split()


def _check_tokens(
    views: Sequence[AttentionWeights],
    keys: list[str] | None,
    queries: list[str] | None,
    element: int,
) -> None:
    """Raises UsageError if tokens fit no attention; the message lists the lengths."""
    batch = min(view.weights.shape[0] for view in views)
    if element >= batch:
        raise UsageError(f"There is no batch element {element}; there are 0 to {batch - 1}.")
    for words, axis, option in ((keys, 3, "--tokens"), (queries, 2, "--query-tokens")):
        lengths = sorted({view.weights.shape[axis] for view in views})
        if words is not None and len(words) not in lengths:
            listed = " or ".join(map(str, lengths))
            raise UsageError(f"{option} has {len(words)} tokens where the length is {listed}.")
