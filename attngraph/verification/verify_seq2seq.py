"""Parity of the files of an encoder-decoder, each with its part and together over steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from attngraph.compiling.beginning import Progress
from attngraph.compiling.provenance import Provenance
from attngraph.decoding.checking import Encoded
from attngraph.decoding.compile_seq2seq import encodings, sources_of
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.merging import merged_parity
from attngraph.decoding.rules import Rules
from attngraph.decoding.seq2seq import DECODER, ENCODER, MERGED, Seq2Seq, Wiring
from attngraph.export.parity.budget import merge
from attngraph.export.runtime.session import Session
from attngraph.frontend.families.seq2seq import of_transformers
from attngraph.ir.ranges import Ranges
from attngraph.options import DEFAULTS, Options
from attngraph.paths import require_file
from attngraph.verification.verify import Verification, verify_file


def verify_seq2seq(
    module: torch.nn.Module,
    name: str,
    folder: Path,
    options: Options = DEFAULTS,
    *,
    progress: Progress | None = None,
) -> list[Verification]:
    """Compares each file of a folder that `optimize` wrote with its part of the model.

    The decoder's steps attend to what the folder's own encoder gives, and are compared with the
    whole model without a cache; a merged file is compared with these two. Raises LoadError where
    one of the two is missing, and as `verify_file`.
    """
    parts = of_transformers(module, None, None, name)
    paths = {file: folder / file for file in (ENCODER, DECODER)}
    for path in paths.values():
        require_file(path)
    merged = folder / MERGED
    check = partial(verify_file, options=options, progress=progress)
    with Session.open(paths[ENCODER], options.device, **options.session) as encoder:
        found = [check(parts.encoder, paths[ENCODER], encoder)]
        said = encoder.metadata
        wiring = Wiring.of_file(said, paths[ENCODER])
        rules = Rules.of_file(said, paths[ENCODER])
        ranges = Ranges.of_file(said, paths[ENCODER])

        def encoded(decoder: Decoder) -> Iterator[Encoded]:
            return encodings(parts, Seq2Seq(encoder, decoder, wiring, rules), ranges)

        with Session.open(paths[DECODER], options.device, **options.session) as opened:
            found.append(check(parts.decoder, paths[DECODER], opened, encoded=encoded))
            if not merged.is_file():
                return found
            model = Seq2Seq(encoder, Decoder.load(paths[DECODER], options.target), wiring, rules)
            with Session.open(merged, options.device, **options.session) as both:
                sources = sources_of(parts, ranges, wiring)
                precision = Provenance.read(opened.metadata, paths[DECODER]).precision or "fp32"
                chosen = bool(Provenance.read(said, paths[ENCODER]).chosen)
                parity = merged_parity(model, both, sources, precision, chosen=chosen)
    culprit = "" if parity.passed else "It gives something else than the other two files."
    if not all(each.passed for each in found):
        culprit = f"{culprit} The other two files are not those of the model.".strip()
    cases = {"": parity, **{Path(each.path).name: each.parity for each in found}}
    source, target = parts.decoder.source, options.target
    told = Verification(source, str(merged), target, {}, merge(cases), culprit=culprit)
    return [*found, told]
