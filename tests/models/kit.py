"""What a model of the suite is, and the sizes, weights and inputs that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.export import Dim

Sizes = Mapping[str, int]
Args = tuple[Tensor, ...]

HIDDEN, HEADS, LAYERS, FEED_FORWARD, VOCABULARY, POSITIONS = 64, 4, 2, 96, 120, 64
BATCH = Dim("batch", max=1024)
SEQ = Dim("seq", max=POSITIONS)
TARGET = Dim("target", max=POSITIONS)
TRACED = {"batch": 3, "seq": 9, "source": 9, "target": 7}
OTHERS = (
    {"batch": 5, "seq": 14, "source": 14, "target": 6},
    {"batch": 1, "seq": 5, "source": 5, "target": 11},
)


@dataclass(frozen=True)
class Built:
    """One model with everything a test asks of it.

    `inputs(sizes)` makes positional inputs for any size of the named dims; `args` are those of the
    traced size. `sites` counts the attentions. `unmasked` maps each mask's name to the same model
    and inputs with that mask dropped.
    """

    module: nn.Module
    inputs: Callable[[Sizes], Args]
    input_names: tuple[str, ...]
    dynamic_shapes: tuple[dict[int, Dim], ...]
    sites: int
    unmasked: dict[str, tuple[nn.Module, Args]] = field(default_factory=dict)

    @property
    def args(self) -> Args:
        return self.inputs(TRACED)

    @property
    def sizes(self) -> tuple[dict[str, int], ...]:
        """Sizes to test besides the traced one, for the dims that this model has."""
        names = {dim.__name__ for axes in self.dynamic_shapes for dim in axes.values()}
        return tuple({name: sizes[name] for name in sizes if name in names} for sizes in OTHERS)


@dataclass(frozen=True)
class Case:
    """A named model of the suite; `build` is deterministic."""

    name: str
    build: Callable[[], Built]


def peaked(module: nn.Module, gain: float = 1.5) -> nn.Module:
    """Re-initialise in place, for attention scores with a standard deviation of about `gain`²."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if name.endswith("bias"):
                    parameter.normal_(0, 0.2, generator=random)
                elif parameter.ndim < 2:
                    parameter.normal_(1, 0.2, generator=random)
                else:
                    transposed = (
                        type(owner).__name__ == "Conv1D"
                    )  # GPT-2 keeps weights as (in, out)
                    fan_in = parameter.shape[0] if transposed else parameter[0].numel()
                    parameter.normal_(0, gain / max(fan_in, 1) ** 0.5, generator=random)
    return module.eval()


def present(batch: int, seq: int) -> Tensor:
    """(B, S) bool, true where there is a token.

    Row b is padded on the left by b % 3 and has a hole before its last token.
    """
    position, padding = torch.arange(seq), torch.arange(batch)[:, None] % 3
    return (position >= padding) & ((position != seq - 2) | (seq < 4))


def tokens(batch: int, seq: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, seq), generator=random)


def states(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
