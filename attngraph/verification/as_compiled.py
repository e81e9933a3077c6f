"""The model's graph as a compile of that file took it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir

from attngraph.checks.branches import followed, settled
from attngraph.checks.check import Check
from attngraph.checks.traced import required_conditions
from attngraph.decoding.checking import decoding_cases, inputs_at
from attngraph.decoding.compile import of_causal_lm, take_every_step
from attngraph.decoding.lengths import lengths_of
from attngraph.export.precision import own_precision
from attngraph.export.runtime.session import Session
from attngraph.frontend.capture import Captured
from attngraph.frontend.families.cache import METADATA_KEY, Layout
from attngraph.frontend.families.causal_lm import is_causal_lm
from attngraph.frontend.model import Model
from attngraph.options import DecoderOptions


def captured_as_compiled(
    model: Model, path: Path, session: Session
) -> tuple[Model, Captured, Layout | None]:
    """The model's graph, and the layout of its cache if the file is a decoder of this model."""
    decoder = session.metadata.get(METADATA_KEY)
    layout = None if decoder is None else Layout.from_json(decoder, str(path))
    if layout is not None and is_causal_lm(model.module):
        declared = _declared_output(path, layout.logits)
        whole = len(declared) < 2 or declared[1] != 1
        decoding = DecoderOptions(
            all_logits=whole,
            padding=layout.mask is not None,
            position_ids=layout.positions is not None,
        )
        model = of_causal_lm(model, decoding, by_token=layout.piece == 1)
        if set(layout.pasts) <= set(model.names):  # a file from before its names were the runtimes'
            model = replace(model, names={})
    captured, check = _traced(model, layout, elsewhere=layout is None)
    if any(suspect.beyond for suspect in captured.suspects):
        required = required_conditions(check, captured.graph)
        if any(each.beyond and each.start is None for each in required):  # as a compile does
            captured, _ = _traced(model, layout, elsewhere=False)
    if layout is None or not {layout.ids, *layout.pasts} <= set(captured.input_names):
        return model, captured, None
    take_every_step(captured.graph, layout)
    return model, captured, layout


def _traced(model: Model, layout: Layout | None, *, elsewhere: bool) -> tuple[Captured, Check]:
    captured = followed(model, verifies=True, elsewhere=elsewhere)
    own = own_precision(captured.graph)

    def checked(captured: Captured) -> Check:
        if layout is None or not {layout.ids, *layout.pasts} <= set(captured.input_names):
            return Check(model, captured, own)
        take_every_step(captured.graph, layout)
        cases = decoding_cases(captured, layout, lengths_of(captured.graph, layout))
        return Check(model, captured, own, cases, at=inputs_at(captured, layout))

    if captured.branches:
        return settled(model, checked(captured), checked, elsewhere=elsewhere)
    return captured, Check(model, captured, own)


def _declared_output(path: Path, name: str) -> list[Any]:
    """The dims of an output as the file declares them; numbers, and anything else for the rest."""
    for value in onnx_ir.load(path).graph.outputs:
        if value.name == name and value.shape is not None:
            return list(value.shape)
    return []
