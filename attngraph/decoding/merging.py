"""Makes the file of an encoder-decoder that begins with hidden states, and checks it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from attngraph.decoding.seq2seq import Seq2Seq
from attngraph.errors import ParityError
from attngraph.export.files.merged import HIDDEN, USES_CACHE, merged
from attngraph.export.files.staged import Staged
from attngraph.export.formats import Precision
from attngraph.export.parity.budget import Parity, compare, merge
from attngraph.export.parity.reference import ReferenceOutputs
from attngraph.export.runtime.session import Session
from attngraph.frontend.families.cache import METADATA_KEY
from attngraph.optimized import Optimized
from attngraph.options import Options

Sources = Iterable[tuple[str, Mapping[str, torch.Tensor]]]
"""What is encoded in a check, each with a name."""
_STEPS = ((1, 0), (3, 0), (1, 3), (2, 4))
"""(new tokens, tokens in the cache): two first steps, and two behind the second of them."""


def merge_first_step(
    model: Seq2Seq, keys: Optimized, sources: Sources, options: Options, staged: Staged | None
) -> Optimized:
    """`model`'s decoder with what `keys` computes of hidden states, in one graph.

    Raises ParityError where it gives anything else than the encoder and the decoder.
    """
    decoder = model.decoder.optimized
    assert decoder is not None
    given = {value.name for value in keys.model.graph.outputs}
    computed = {name: origin for name, origin in model.wiring.memory.items() if origin in given}
    made = merged(decoder.model, keys.model, computed)
    del made.metadata_props[METADATA_KEY]
    report = replace(
        decoder.report,
        source=f"{decoder.report.source}, merged with its first step",
        parity=None,
        coverage=None,
        timings={},
        notes=[],
    )
    found = Optimized(
        decoder.graph, made, report, decoder.target, options=options.session, staged=staged
    )
    if options.verifies:
        both = [part.report.quantised for part in (keys, model.encoder) if part is not None]
        chosen = any(each is not None and each.chosen for each in both)
        report.parity = merged_parity(
            model, found.session, sources, report.precision, chosen=chosen
        )
        if not report.parity.passed:
            raise ParityError(
                f"{report.source}, gives other logits than alone: {report.parity}. Nothing was "
                "written."
            )
    return found


def merged_parity(
    model: Seq2Seq,
    session: Session,
    sources: Sources,
    precision: Precision,
    *,
    chosen: bool = False,
) -> Parity:
    """How far a merged decoder is from `model`, whose parts were held against eager.

    Where codes of weights were `chosen` by samples, what the first step computes of hidden states
    is by other codes than the encoder's: the decoder is given these keys, and they are compared
    with none.
    """
    found: dict[str, Parity] = {}
    for label, source in sources:
        for case, parity in _cases(model, session, source, precision, chosen):
            found[", ".join(filter(None, (label, case)))] = parity
    return merge(found)


def _cases(
    model: Seq2Seq,
    session: Session,
    source: Mapping[str, torch.Tensor],
    precision: Precision,
    chosen: bool,
) -> Iterable[tuple[str, Parity]]:
    """Each of _STEPS for one thing that is encoded."""
    encoder, decoder, layout = model.encoder_session, model.decoder.session, model.decoder.layout
    encoded = {**source, **dict(zip(encoder.output_names, encoder.run(source), strict=True))}
    memory = {
        name: encoded[origin].to(decoder.input_dtype(name))
        for name, origin in model.wiring.memory.items()
    }
    computed = {n: o for n, o in model.wiring.memory.items() if o in session.output_names}
    nothing = {name: value[:, :, :0] for name, value in memory.items() if name in computed}
    hidden = encoded["last_hidden_state"].to(session.input_dtype(HIDDEN))
    rows, random = len(hidden), torch.Generator().manual_seed(2)
    sizes = {layout.batch: rows, layout.past: 0}
    empty = {name: decoder.zeros(name, sizes) for name in layout.pasts}
    pasts = empty
    for new, held in _STEPS:
        ids = torch.randint(layout.vocabulary or 2, (rows, new), generator=random)
        feeds = {**memory, **(pasts if held else empty), layout.ids: ids}
        begun = {} if held else nothing
        first = {**feeds, **begun, HIDDEN: hidden, USES_CACHE: torch.tensor([held > 0])}
        outputs = dict(zip(session.output_names, session.run(first), strict=True))
        if chosen and not held:
            feeds |= {name: outputs[origin] for name, origin in computed.items()}
        expected = dict(zip(decoder.output_names, decoder.run(feeds), strict=True))
        pasts = {p: expected[q] for p, q in zip(layout.pasts, layout.presents, strict=True)}
        if not held:
            expected.update({origin: feeds[name] for name, origin in computed.items()})
        wanted = ReferenceOutputs(
            tuple(expected), tuple(expected.values()), (None,) * len(expected)
        )
        parity = compare(wanted, [outputs[name] for name in expected], precision)
        against = tuple(replace(output, reference="parts") for output in parity.outputs)
        yield f"{new} behind {held}", replace(parity, outputs=against)
