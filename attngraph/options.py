"""The choices that a compile leaves to its user, checked where they are made. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from attngraph.errors import UsageError
from attngraph.export.formats import Precision, Weights
from attngraph.export.runtime.provider_options import check_settings
from attngraph.export.target import Target, parse_target
from attngraph.numeric import whole

Verify = Literal["final", "each", "off"]
CacheKind = Literal["growing", "static"]
ASSUMPTIONS = ("no-fully-masked-rows",)
"""What a user may vouch for where it can't be proved."""


@dataclass(frozen=True)
class Options:
    """How a model is compiled; `attngraph.optimize` says what each of them means.

    `precision` None is that of the model's weights. `session` are keyword arguments of
    `Session.open`, for the sessions that check, tune and are handed over. What `decodes` computes
    one row in most of its calls. Raises UsageError for a value that there isn't, with those there
    are.
    """

    target: str = "cpu"
    precision: Precision | None = None
    verify: str = "final"
    exact: bool = False
    tune: bool = False
    assume: Collection[str] = ()
    ignore_padded_rows: bool = False
    weights: Weights | None = None
    session: Mapping[str, Any] = field(default_factory=dict)
    decodes: bool = False

    def __post_init__(self) -> None:
        _check("verify", self.verify, get_args(Verify))
        _check("precision", self.precision, (None, *get_args(Precision)))
        _check("weights", self.weights, (None, *get_args(Weights)))
        check_assumptions(self.assume)
        check_settings(self.device, self.session)

    @property
    def device(self) -> Target:
        """The target, read."""
        return parse_target(self.target)

    @property
    def verifies(self) -> bool:
        """Whether the result is compared with eager."""
        return self.verify != "off"

    def of_pipeline(self) -> dict[str, Any]:
        """Keyword arguments of `pipeline`, which can be written as JSON."""
        return {
            "assume": sorted(self.assume),
            "exact": self.exact,
            "ignore_padded_rows": self.ignore_padded_rows,
            # whether the provider has kernels for attention over rows without padding
            "packed_attention": self.device.provider == "cuda",
            "few_bits": self.weights is not None,
            # the CPU has no launches to save, and copies what it splits
            "part": self.device.provider == "cpu" and self.weights is None and not self.decodes,
        }


@dataclass(frozen=True)
class DecoderOptions:
    """How a decoder keeps its cache; `attngraph.optimize_decoder` says what each of them means.

    Raises UsageError for a kind of cache that there isn't, or a length that doesn't fit it.
    """

    cache: CacheKind = "growing"
    max_length: int | None = None
    presents: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        _check("cache", self.cache, get_args(CacheKind))
        length = self.max_length
        if self.cache == "growing" and length is not None:
            raise UsageError(
                "max_length is for a static cache; leave it out, or ask for cache static."
            )
        if self.cache == "static" and length is None:
            raise UsageError(
                "A static cache needs max_length, the number of tokens it has room for."
            )
        if length is not None:
            whole("max_length", length, 2)


def check_assumptions(names: Collection[str]) -> None:
    """Raises UsageError at a name that is not of `ASSUMPTIONS`, or where there is no list."""
    if isinstance(names, str):
        raise UsageError(f"assume is {names!r}; give a list of names, such as [{names!r}].")
    for name in names:
        if name not in ASSUMPTIONS:
            raise UsageError(f"assume names {name!r}; it can be {', '.join(ASSUMPTIONS)}.")


def _check(what: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        listed = ", ".join(name for name in allowed if name is not None)
        raise UsageError(f"{what} is {value!r}; it can be {listed}.")


DEFAULTS, DECODER_DEFAULTS = Options(), DecoderOptions()
