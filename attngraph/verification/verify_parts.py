"""Parity of a folder's files, each with its part of the model and all together over steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from attngraph.compiling.provenance import Provenance
from attngraph.decoding.checking import Encoded
from attngraph.decoding.compile_multimodal import beside_decoder, seen_images
from attngraph.decoding.compile_seq2seq import encodings, sources_of
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.merging import merged_parity
from attngraph.decoding.multimodal import Multimodal
from attngraph.decoding.rules import NO_RULES, Rules
from attngraph.decoding.seq2seq import ENCODER, MERGED, Seq2Seq, Wiring
from attngraph.errors import ParityError
from attngraph.export.parity.budget import merge
from attngraph.export.runtime.session import Session
from attngraph.frontend.families.joining import Joining
from attngraph.frontend.families.multimodal import of_images
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
) -> list[Verification]:
    """Compares each file of a folder that `optimize` wrote with its part of the model.

    The decoder's steps attend to what the folder's own encoder gives, and are compared with the
    whole model without a cache; a merged file is compared with these two. Raises LoadError where
    one of the two is missing, and as `verify_file`.
    """
    parts = of_transformers(module, None, None, name)
    path, decoder_path = (folder / file for file in (ENCODER, Seq2Seq.decoder_file))
    for each in (path, decoder_path):
        require_file(each)
    merged = folder / MERGED
    check = partial(verify_file, options=options)
    with contextlib.ExitStack() as held:
        encoder = _opened(path, options, held)
        found = [check(parts.encoder, path, encoder)]
        said = encoder.metadata
        wiring, rules = Wiring.of_file(said, path), Rules.of_file(said, path)
        ranges = Ranges.of_file(said, path)

        def encoded(decoder: Decoder) -> Iterator[Encoded]:
            return encodings(parts, Seq2Seq(encoder, decoder, wiring, rules), ranges)

        opened = _opened(decoder_path, options, held)
        found.append(check(parts.decoder, decoder_path, opened, encoded=encoded))
        if not merged.is_file():
            return found
        model = Seq2Seq(encoder, Decoder.load(decoder_path, options.target), wiring, rules)
        precision = Provenance.read(opened.metadata, decoder_path).precision or "fp32"
        parity = merged_parity(
            model,
            _opened(merged, options, held),
            sources_of(parts, ranges, wiring),
            precision,
            chosen=bool(Provenance.read(said, path).chosen),
        )
    culprit = "" if parity.passed else "It gives something else than the other two files."
    if not all(each.passed for each in found):
        culprit = f"{culprit} The other two files are not those of the model.".strip()
    cases = {"": parity, **{Path(each.path).name: each.parity for each in found}}
    source, target = parts.decoder.source, options.target
    told = Verification(source, str(merged), target, {}, merge(cases), culprit=culprit)
    return [*found, told]


def verify_multimodal(
    module: torch.nn.Module,
    name: str,
    folder: Path,
    options: Options = DEFAULTS,
) -> list[Verification]:
    """Compares each file of a folder that `optimize` wrote with its part of the model.

    The decoder's steps read what the folder's other files give, and are compared with the whole
    model without a cache. Raises LoadError where a file is missing, ParityError where the folder
    has another token for images than the model, and as `verify_file` does.
    """
    parts = of_images(module, None, None, name)
    made = beside_decoder(parts)
    decoder_path = folder / Multimodal.decoder_file
    for path in (*(folder / file for file in made), decoder_path):
        require_file(path)
    check = partial(verify_file, options=options)
    with contextlib.ExitStack() as held:
        sessions = {file: _opened(folder / file, options, held) for file in made}
        joinings = [side.joining for side in parts.sides]
        for joining in joinings:
            kind = joining.modality
            said = Joining.of_file(sessions[kind.encoder].metadata, folder / kind.encoder)
            if said != joining:
                raise ParityError(
                    f"{folder / kind.encoder} puts {kind.what} where ids are {said.token}, and "
                    f"{name} where they are {joining.token}, or cuts them otherwise. Compile it "
                    "again."
                )

        def encoded(decoder: Decoder) -> Iterator[Encoded]:
            return seen_images(parts, Multimodal(sessions, decoder, joinings, NO_RULES))

        found = [check(part, folder / file, sessions[file]) for file, part in made.items()]
        decoder = _opened(decoder_path, options, held)
        found.append(check(parts.decoder, decoder_path, decoder, encoded=encoded))
    return found


def _opened(path: Path, options: Options, held: contextlib.ExitStack) -> Session:
    return held.enter_context(Session.open(path, options.device, **options.session))
