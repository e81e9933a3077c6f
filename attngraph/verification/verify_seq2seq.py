"""Parity of the files of an encoder-decoder, each with its part and together over steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from attngraph.compiling.beginning import Progress
from attngraph.decoding.checking import Encoded
from attngraph.decoding.compile_seq2seq import encodings
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.rules import Rules
from attngraph.decoding.seq2seq import (
    DECODER,
    ENCODER,
    FIRST,
    METADATA_KEY,
    RULES_KEY,
    Seq2Seq,
    Wiring,
)
from attngraph.export.runtime.session import Session
from attngraph.frontend.seq2seq import of_transformers
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
    whole model without a cache. Raises LoadError where a file is missing, and as `verify_file`.
    """
    parts = of_transformers(module, None, None, name)
    paths = {file: folder / file for file in (ENCODER, DECODER)}
    for path in paths.values():
        require_file(path)
    first = folder / FIRST
    check = partial(verify_file, options=options, progress=progress)
    with Session.open(paths[ENCODER], options.device, **options.session) as encoder:
        found = [check(parts.encoder, paths[ENCODER], encoder)]
        said = encoder.metadata
        wiring = Wiring.from_json(said.get(METADATA_KEY), str(paths[ENCODER]))
        rules = Rules.from_json(said.get(RULES_KEY), str(paths[ENCODER]))
        ranges = Ranges.of_file(said, paths[ENCODER])

        def encoded(decoder: Decoder) -> Iterator[Encoded]:
            return encodings(parts, Seq2Seq(encoder, decoder, wiring, rules), ranges)

        with Session.open(paths[DECODER], options.device, **options.session) as decoder:
            found.append(check(parts.decoder, paths[DECODER], decoder, encoded=encoded))
    if parts.first is not None and first.is_file():
        with Session.open(first, options.device, **options.session) as session:
            found.append(check(parts.first, first, session))
    return found
