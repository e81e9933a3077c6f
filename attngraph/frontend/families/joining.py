"""How images join the text, as a file's metadata says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngraph.frontend.families.described import Described
from attngraph.frontend.families.image_parts import Seen
from attngraph.frontend.families.image_sizes import Tiles
from attngraph.frontend.interface.modalities import IMAGES, SOUND, Modality


@dataclass(frozen=True)
class Joining(Described):
    """`token` stands for a piece of an image in ids, of `merged` patches by as many where images
    lie on grids. With a `unit`, images are encoded one by one and their sides are multiples of it;
    with `tiles`, each comes as such. `sees` says what is told of each token. Where it is `sound`
    the token stands for a piece of that.
    """

    token: int
    merged: int = 1
    unit: int | None = None
    tiles: Tiles | None = None
    sees: Seen | None = None
    sound: bool = False

    @property
    def modality(self) -> Modality:
        """What joins the text."""
        return SOUND if self.sound else IMAGES

    key: ClassVar[str] = "attngraph.images"
    unlike: ClassVar[str] = (
        "which token stands for an image: it wasn't compiled as the vision encoder of a model that "
        "reads images"
    )
