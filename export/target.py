"""The machine a model is compiled for: an execution provider and, on CUDA, an SM version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attngraph.errors import UsageError

Provider = Literal["cpu", "cuda"]

EXECUTION_PROVIDERS: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
}

# What CUDA 13, which the onnxruntime wheels are built for, still compiles for.
COMPUTE_CAPABILITIES = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


@dataclass(frozen=True)
class Target:
    """An execution provider; `sm` is the compute capability times ten (80 = 8.0), None = any."""

    provider: Provider
    sm: int | None = None

    @property
    def execution_provider(self) -> str:
        """onnxruntime's name for the provider."""
        return EXECUTION_PROVIDERS[self.provider]

    def __str__(self) -> str:
        return self.provider if self.sm is None else f"{self.provider}:sm{self.sm}"


def parse_target(text: str) -> Target:
    """Read "cpu", "cuda" or "cuda:sm80"; `str()` of the result reads back.

    Raises UsageError, listing what exists, for anything else.
    """
    if text == "cpu":
        return Target("cpu")
    if text == "cuda":
        return Target("cuda")
    for sm in COMPUTE_CAPABILITIES:
        if text == f"cuda:sm{sm}":
            return Target("cuda", sm)
    known = ", ".join(f"sm{sm}" for sm in COMPUTE_CAPABILITIES)
    raise UsageError(
        f"There is no target {text!r}: use cpu, cuda, or cuda: followed by one of {known}."
    )
