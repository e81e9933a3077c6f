"""What a model is compiled for: a machine, and the ONNX operators that its file may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attngraph.errors import UsageError
from attngraph.export.families import FAMILIES

Provider = Literal["cpu", "cuda"]

EXECUTION_PROVIDERS: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
}

# What CUDA 13, which the onnxruntime wheels are built for, still compiles for.
COMPUTE_CAPABILITIES = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


OPSET, OLDEST_OPSET = 24, 21
"""The opset that a file is written in, and the oldest that may be asked for."""

SINCE = {"Attention": 23, "RMSNormalization": 23, "RotaryEmbedding": 23, "TensorScatter": 24}
"""The opsets that brought the operators which the oldest one lacks."""


@dataclass(frozen=True)
class Target:
    """An execution provider; `sm` is the compute capability times ten (80 = 8.0), None = any.

    `family` is that of the CPU (export/families.py), None = this machine's.
    `opset` is that of the standard operators, which are the only ones in a `portable` file.
    """

    provider: Provider
    sm: int | None = None
    opset: int = OPSET
    portable: bool = False
    family: str | None = None

    @property
    def execution_provider(self) -> str:
        """onnxruntime's name for the provider."""
        return EXECUTION_PROVIDERS[self.provider]

    @property
    def operators(self) -> str:
        """Which operators a file may hold, in words; "" where all of onnxruntime's."""
        said = [] if self.opset == OPSET else [f"opset {self.opset}"]
        return ", ".join([*said, "standard operators only"] if self.portable else said)

    def refuses(self, op: str, since: int = 1) -> str:
        """Why a file can't hold an operator, such as "Attention" or "com.microsoft.QuickGelu".

        `since` is the opset that has it as it is meant. "" where the file can.
        """
        domain, _, name = op.rpartition(".")
        if domain:
            return f"{domain} is no domain of standard operators" if self.portable else ""
        return f"opset {self.opset} lacks it" if self.opset < max(since, SINCE.get(name, 1)) else ""

    def __str__(self) -> str:
        kind = self.family if self.sm is None else f"sm{self.sm}"
        return self.provider if kind is None else f"{self.provider}:{kind}"


def parse_target(text: str) -> Target:
    """Read "cpu", "cpu:avx512", "cuda" or "cuda:sm80"; `str()` of the result reads back.

    Raises UsageError, listing what exists, for anything else.
    """
    if text == "cpu":
        return Target("cpu")
    if text == "cuda":
        return Target("cuda")
    for family in FAMILIES:
        if text == f"cpu:{family}":
            return Target("cpu", family=family)
    for sm in COMPUTE_CAPABILITIES:
        if text == f"cuda:sm{sm}":
            return Target("cuda", sm)
    known = ", ".join(f"sm{sm}" for sm in COMPUTE_CAPABILITIES)
    raise UsageError(
        f"There is no target {text!r}: use cpu, cuda, or cuda: followed by one of {known}, or cpu: "
        f"followed by one of {', '.join(FAMILIES)}."
    )
