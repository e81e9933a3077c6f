"""Parity of the files of a model that reads images, each with its part and together over steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from attngraph.compiling.beginning import Progress
from attngraph.decoding.checking import Encoded
from attngraph.decoding.compile_multimodal import beside_decoder, seen_images
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.multimodal import DECODER, Multimodal
from attngraph.decoding.rules import NO_RULES
from attngraph.errors import ParityError
from attngraph.export.runtime.session import Session
from attngraph.frontend.families.joining import Joining
from attngraph.frontend.families.multimodal import of_images
from attngraph.options import DEFAULTS, Options
from attngraph.paths import require_file
from attngraph.verification.verify import Verification, verify_file


def verify_multimodal(
    module: torch.nn.Module,
    name: str,
    folder: Path,
    options: Options = DEFAULTS,
    *,
    progress: Progress | None = None,
) -> list[Verification]:
    """Compares each file of a folder that `optimize` wrote with its part of the model.

    The decoder's steps read what the folder's other files give, and are compared with the whole
    model without a cache. Raises LoadError where a file is missing, ParityError where the folder
    has another token for images than the model, and as `verify_file` does.
    """
    parts = of_images(module, None, None, name)
    made = beside_decoder(parts)
    for file in (*made, DECODER):
        require_file(folder / file)
    check = partial(verify_file, options=options, progress=progress)
    with contextlib.ExitStack() as held:

        def opened(file: str) -> Session:
            session = Session.open(folder / file, options.device, **options.session)
            return held.enter_context(session)

        sessions = {file: opened(file) for file in made}
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
        decoder = opened(DECODER)
        found.append(check(parts.decoder, folder / DECODER, decoder, encoded=encoded))
    return found
