"""The choices that a compile leaves to its user, checked where they are made. Imports no torch.

An option is declared here once: its name, type and default are a field's, and a `Flag` beside the
type makes it one of the command line too (attngraph/cli/flags.py). The keywords of
`attngraph.optimize` and its like are these fields by name (attngraph/keywords.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from attngraph.errors import UsageError
from attngraph.export.formats import Activations, Precision, Weights
from attngraph.export.runtime.provider_options import check_settings
from attngraph.export.target import OLDEST_OPSET, OPSET, Target, parse_target
from attngraph.flag import Flag
from attngraph.numeric import whole

Verify = Literal["final", "each", "off"]
CacheKind = Literal["growing", "static"]
Runtime = Literal["genai"]
"""Another's runtime, for which a decoder's file comes with what that reads beside it."""
DECODING = "Decoding"
"""Under which heading the command line lists the options of a cache."""
ASSUMPTIONS = ("no-fully-masked-rows",)
"""What a user may vouch for where it can't be proved."""

TargetName: TypeAlias = Annotated[
    str, Flag("The machine it will run on: cpu, cuda, or e.g. cpu:avx512 or cuda:sm80.")
]
Assumptions: TypeAlias = Annotated[
    Collection[str],
    Flag(
        "What to rely on without proof. no-fully-masked-rows: every query has a key, so a finite "
        "fill may count as -inf.",
        metavar="ASSUMPTION",
    ),
]


@dataclass(frozen=True)
class Options:
    """How a model is compiled; `attngraph.optimize` says what each option means.

    `precision` None is that of the model's weights. `session` are keyword arguments of
    `Session.open`, for the sessions that check, tune and are handed over. A model that `decodes` is
    given one row in most of its calls. Raises UsageError for an unknown value; the message lists
    the known ones.
    """

    target: TargetName = "cpu"
    precision: Annotated[
        Precision | None,
        Flag(
            "fp16 or bf16 convert a float32 model; what the error budget needs stays in fp32. "
            "Inputs and outputs keep their dtypes, but for caches. Default: that of the weights."
        ),
    ] = None
    verify: Annotated[
        Verify,
        Flag("Compare with eager PyTorch: the final result, also after each pass, or not."),
    ] = "final"
    exact: Annotated[
        bool,
        Flag(
            "Only rewrites that keep the model's formulas: none that multiplies weights with each "
            "other or moves a factor through a sum."
        ),
    ] = False
    tune: Annotated[
        bool,
        Flag(
            "Measure on this machine which form of each attention is fastest; what was measured is "
            "kept in your cache folder."
        ),
    ] = False
    ignore_padded_rows: Annotated[
        bool,
        Flag(
            "Compute an encoder's linears, norms and the like for valid tokens only. The rows of "
            "tokens that its padding mask hides become unspecified."
        ),
    ] = False
    weights: Annotated[
        Weights | None,
        Flag(
            "Store the weights of linears in 8 or 4 bits. What that costs the outputs is measured "
            "and reported; the kernels' own error keeps to the usual budget."
        ),
    ] = None
    activations: Annotated[
        Activations | None,
        Flag(
            "Beside --weights: also round what such linears are given to 8 bits, each row by "
            "itself, for the CPU's products of integers. What that costs is reported."
        ),
    ] = None
    budget: Annotated[
        str | None,
        Flag(
            "Beside --activations: the most that the first output may be off, in rms, on your "
            "sample, such as 1%. The linears that cost the most error are given 16 bits, or stay "
            "in float.",
            metavar="SHARE",
        ),
    ] = None
    calibrate: Annotated[
        Path | None,
        Flag(
            "Beside --weights: arrays by input name, as --inputs has them. Codes of weights are "
            "chosen so that layers lose the least on them (GPTQ), and with --activations outliers "
            "are looked for there, by default on the sample and the sizes that are checked.",
            metavar="DATA.npz",
        ),
    ] = None
    portable: Annotated[
        bool,
        Flag(
            "Write standard ONNX operators only, none of onnxruntime's own: for OpenVINO, TensorRT "
            "and others."
        ),
    ] = False
    opset: Annotated[
        int,
        Flag(
            f"The opset of the standard operators, {OLDEST_OPSET} to {OPSET}: an older one for "
            "runtimes that don't know the newest yet.",
            metavar="N",
        ),
    ] = OPSET
    single_file: Annotated[
        bool,
        Flag(
            "Write the weights into the ONNX file, up to 2 GiB, for readers that take no other, "
            "such as transformers.js. Otherwise more than 16 MiB of them go beside it, into "
            "NAME.onnx_data, from where sessions start twice as fast."
        ),
    ] = False
    assume: Assumptions = ()
    session: Mapping[str, Any] = field(default_factory=dict)
    decodes: bool = False

    def __post_init__(self) -> None:
        _check("verify", self.verify, get_args(Verify))
        _check("precision", self.precision, (None, *get_args(Precision)))
        _check("weights", self.weights, (None, *get_args(Weights)))
        _check("activations", self.activations, (None, *get_args(Activations)))
        if self.activations is not None:
            self._check_activations(self.activations)
        if self.budget is not None:
            self._check_budget(self.budget)
        if self.calibrate is not None and self.weights is None:
            raise UsageError(
                f"--calibrate {self.calibrate} is for weights that are quantized: add "
                "--weights int8, or int4."
            )
        whole("opset", self.opset, OLDEST_OPSET, OPSET)
        if self.portable and self.activations is not None:
            raise UsageError(
                f"--activations {self.activations} needs an operator of onnxruntime's own, and "
                "--portable writes standard operators only: leave out one of the two."
            )
        check_assumptions(self.assume)
        check_settings(self.device, self.session)

    def _check_activations(self, activations: str) -> None:
        if self.weights is None:
            raise UsageError(
                f"--activations {activations} is for products with quantized weights: add "
                "--weights int8, or int4."
            )
        if self.device.provider != "cpu":
            raise UsageError(
                f"--activations {activations} is for the CPU: onnxruntime's kernels for "
                f"{self.device.provider} round no activations. Leave it out."
            )

    def _check_budget(self, budget: str) -> None:
        if self.activations is None or not self.verifies:
            raise UsageError(
                f"--budget {budget} is measured where activations are rounded: add --activations "
                "int8, and leave out --verify off."
            )
        try:
            share = _share(budget)
        except ValueError:
            share = 0.0
        if not 0 < share < 1:
            raise UsageError(
                f"budget is {budget!r}; it is a share of the output's rms, such as 1% or 0.01."
            )

    @property
    def share(self) -> float | None:
        """The budget, read: a number between 0 and 1."""
        return None if self.budget is None else _share(self.budget)

    @property
    def device(self) -> Target:
        """The target, read, with the operators that a file may hold."""
        return replace(parse_target(self.target), opset=self.opset, portable=self.portable)

    @property
    def verifies(self) -> bool:
        """Whether the result is compared with eager."""
        return self.verify != "off"

    @property
    def _parts(self) -> bool:
        """Whether products stay apart: the CPU has no launches to save, and copies its splits."""
        in_blocks = self.weights is not None and not self.weights == self.activations == "int8"
        return self.device.provider == "cpu" and not in_blocks and not self.decodes

    def of_pipeline(self) -> dict[str, Any]:
        """Keyword arguments of `pipeline`, which can be written as JSON."""
        return {
            "assume": sorted(self.assume),
            "exact": self.exact,
            "ignore_padded_rows": self.ignore_padded_rows,
            # whether the provider has kernels for attention over rows without padding
            "packed_attention": self.device.provider == "cuda" and self.opset == OPSET,
            "few_bits": self.weights is not None,
            "recurrences": self.device.provider == "cpu" and not self.portable,
            "part": self._parts,
            "apart": self.device.provider == "cpu",
            # the operator for experts was tried on the CPU, in float32 and with codes of 4 bits;
            # with 8 bits it rounds the rows to 8 as well, or takes longer than in floats
            "experts": self.device.provider == "cpu"
            and not (self.portable or self.weights == "int8")
            and self.precision in (None, "fp32"),
            "in_fp16": self.precision == "fp16",
        }


@dataclass(frozen=True)
class DecoderOptions:
    """How a decoder keeps its cache; `attngraph.optimize_decoder` says what each option means.

    Raises UsageError for an unknown kind of cache, a length that doesn't fit it, and options that
    don't go together.
    """

    cache: Annotated[
        CacheKind,
        Flag(
            "growing: each step gives a cache that is longer, and leaves the old one. static: "
            "buffers of --max-length tokens, which a step writes into where they lie.",
            panel=DECODING,
        ),
    ] = "growing"
    max_length: Annotated[
        int | None,
        Flag(
            "The tokens, of prompt and continuation, that a static cache has room for.",
            metavar="TOKENS",
            panel=DECODING,
        ),
    ] = None
    presents: Mapping[str, str] | None = None
    all_logits: Annotated[
        bool,
        Flag(
            "The logits of every position, not of the last alone (models of transformers).",
            panel=DECODING,
        ),
    ] = False
    padding: Annotated[
        bool,
        Flag(
            "No row will be padded, so the graph takes no mask, which leaves faster kernels "
            "to a step on CUDA (models of transformers).",
            panel=DECODING,
        ),
    ] = True
    position_ids: Annotated[
        bool,
        Flag(
            "Positions as an input, for a caller with other ones than the mask says (models "
            "of transformers).",
            panel=DECODING,
        ),
    ] = False
    runtime: Annotated[
        Runtime | None,
        Flag(
            "The runtime that will generate. genai: write genai_config.json beside the file, "
            "and give all logits.",
            name="for",
            panel=DECODING,
        ),
    ] = None

    def __post_init__(self) -> None:
        _check("cache", self.cache, get_args(CacheKind))
        _check("runtime", self.runtime, (None, *get_args(Runtime)))
        if self.runtime is not None and not self.padding:
            raise UsageError(
                f"--for {self.runtime} needs the mask that --no-padding leaves out: drop one."
            )
        if self.position_ids and not self.padding:
            raise UsageError(
                "Positions of one's own (--position-ids) go with the mask that --no-padding leaves "
                "out: keep the padding, or leave the positions to the model."
            )
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

    @property
    def gives_all_logits(self) -> bool:
        """Whether the logits are those of every position, which other runtimes read."""
        return self.all_logits or self.runtime is not None

    def check_with(self, options: Options) -> None:
        """Raises UsageError where a file for a runtime is asked to lack what it runs fastest."""
        if self.runtime is not None and options.portable:
            raise UsageError(
                f"--for {self.runtime} is for a runtime with onnxruntime's own operators, and "
                "--portable writes none of them: leave out one of the two."
            )


def _share(text: str) -> float:
    number, percent, _ = text.partition("%")
    return float(number) / 100 if percent else float(number)


def check_assumptions(names: Collection[str]) -> None:
    """Raises UsageError for a name that `ASSUMPTIONS` lacks, and for a text in place of a list."""
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
