"""The kernel table: which op takes which attention on which provider, and what kernel runs it.

`FORMS` are the ways in which `attn.attention` can be written to ONNX, `LEGAL` says where each may
be used, `KERNELS` what onnxruntime dispatches it to, in the order in which it asks. A need is a
question to `Facts` (export/kernels/needs.py) and must be provable. Sources: "R" run on that
provider against a float64 reference; "D" the real CUDA provider's dispatch, read without a GPU; "S"
onnxruntime's source or documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attngraph.export.kernels.facts import (
    BIAS,
    BOOL,
    CAUSAL,
    EMPTY,
    LENGTHS,
    NORMS,
    PACKED,
    PAST,
    ROTARY,
    ROW_SINKS,
    SINKS,
    SOFTCAP,
    STATIC,
    WEIGHTS,
    WINDOW,
)
from attngraph.export.target import Provider

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALF = frozenset({F16, BF16})


@dataclass(frozen=True)
class Versions:
    """onnxruntime releases from `first` on and before `end`, as (major, minor)."""

    first: tuple[int, int]
    end: tuple[int, int]

    def __contains__(self, version: object) -> bool:
        return isinstance(version, tuple) and self.first <= version[:2] < self.end

    def __str__(self) -> str:
        (major, first), (_, end) = self.first, self.end
        return " or ".join(f"{major}.{minor}" for minor in range(first, end))

    @property
    def newest(self) -> str:
        """A version of pip's that takes the last of them."""
        return f"{self.end[0]}.{self.end[1] - 1}.*"


RELEASES: Mapping[Provider, Versions] = {
    "cpu": Versions((1, 31), (1, 33)),
    "cuda": Versions((1, 31), (1, 32)),
}
"""The onnxruntime releases whose kernels were read or run, for each provider."""


@dataclass(frozen=True)
class Form:
    """One way to write the attention.

    `op` is the operator. `blocks` cuts the queries into so many blocks, each of which sees the keys
    up to its own end through a mask (1: the mask is written out, but nothing is cut); `padded`
    widens every head with zeros to a multiple of 8. What is not `native` to the operator reaches
    it as a mask, sinks as one more key. `inside` is done to query and key by the operator. `since`
    is the opset from which a standard operator can be used so.
    """

    name: str
    op: str
    blocks: int = 0
    padded: bool = False
    native: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    since: int = 1


ATTENTION = Form("Attention", "Attention")
PADDED = Form("Attention, heads padded", "Attention", padded=True)
NONPAD = Form("Attention, lengths", "Attention", native=frozenset({LENGTHS}), since=24)
_CUT = frozenset({WINDOW})
MASKED = Form("Attention, causal mask", "Attention", blocks=1, native=_CUT)
BLOCKS = tuple(
    Form(f"Attention, {n} query blocks", "Attention", blocks=n, native=_CUT) for n in (2, 4, 8)
)
_GQA = "com.microsoft.GroupQueryAttention"
_NATIVE = frozenset({WINDOW, LENGTHS, SINKS})
GROUPED = Form("GroupQueryAttention", _GQA, native=_NATIVE)
WITH_ROTARY = Form(
    "GroupQueryAttention, rotary inside", _GQA, native=_NATIVE, inside=frozenset({ROTARY})
)
WITH_NORMS = Form(
    "GroupQueryAttention, norms and rotary inside",
    _GQA,
    native=_NATIVE,
    inside=frozenset({ROTARY, NORMS}),
)
SHARED = Form("GroupQueryAttention in place", _GQA, native=_CUT)
MULTI_HEAD = Form("MultiHeadAttention", "com.microsoft.MultiHeadAttention")
PACKED_ROWS = Form("PackedMultiHeadAttention", "com.microsoft.PackedMultiHeadAttention")
RESTORED_ROWS = Form("Attention, rows restored", "Attention", since=24)
PRIMITIVE = Form("MatMul, Softmax, MatMul", "Softmax", native=frozenset({SINKS}))

FORMS = (
    *(ATTENTION, PADDED, NONPAD, MASKED, *BLOCKS, GROUPED, WITH_ROTARY, WITH_NORMS),
    *(SHARED, MULTI_HEAD, PACKED_ROWS, RESTORED_ROWS, PRIMITIVE),
)


@dataclass(frozen=True)
class Legal:
    """Where forms may be used: the dtypes, what they take besides Q, K and V, and what must hold.

    `must` are traits without which the form is pointless, `sm` the compute capability that the
    target must be known to have.
    """

    forms: tuple[Form, ...]
    provider: Provider
    dtypes: frozenset[torch.dtype]
    takes: frozenset[str]
    needs: tuple[str, ...] = ()
    must: frozenset[str] = frozenset()
    sm: int = 0
    source: str = "R"


@dataclass(frozen=True)
class Kernel:
    """What a form runs on; the first row whose needs hold. A lower `rank` is faster.

    On the CPU, lengths decide besides: see export/kernels/measured.json.
    """

    forms: tuple[Form, ...]
    provider: Provider
    dtypes: frozenset[torch.dtype]
    name: str
    rank: int
    needs: tuple[str, ...] = ()
    sm: int = 0
    source: str = "D"


_ANY = frozenset({CAUSAL, WINDOW, LENGTHS, BOOL, BIAS, SOFTCAP})
_SINKS = frozenset({SINKS, ROW_SINKS})
_ALL = _ANY | _SINKS | {WEIGHTS, PAST, STATIC}
_IN_PLACE = frozenset({CAUSAL, STATIC})
_F32, _F16 = frozenset({F32}), frozenset({F16})
_CPU = _F32 | _F16
_CUDA = frozenset({F32, F16, BF16})
_EVERY = frozenset({F32, F16, BF16, F64})
_IS_CAUSAL = frozenset({CAUSAL})
_IS_PACKED = frozenset({PACKED})
_WHOLE_HEADS = ("heads share a head size", "scale > 0")
_EQUAL_HEADS = ("H = G", *_WHOLE_HEADS)
_NO_MEAN = "no empty row gets a mean"
_BY_8 = ("D % 8 = 0", "E % 8 = 0")
_TURNS = frozenset({ROTARY})
_LENGTHS = frozenset({LENGTHS})
_BANDED = frozenset({CAUSAL, WINDOW, SOFTCAP})
_CPU_GROUPED = _BANDED | {LENGTHS, SINKS}
_SAME_HEADS = ("S = T", "D % 8 = 0", "E = D", "scale > 0", "no window, or causal")
_WITH_ROTARY = (*_SAME_HEADS, "R % 16 = 0 and D % 16 = 0")
_ON_CPU = (_NO_MEAN, "no window beside lengths")
_ON_CUDA = ("D ≤ 256",)

LEGAL: tuple[Legal, ...] = (
    # onnx infers 0 keys for the weights of a dynamic length, and onnxruntime plans memory by that.
    Legal(
        (ATTENTION,),
        "cpu",
        _EVERY,
        _ALL,
        ("T is static, or no weights are returned", "no past beside sinks"),
    ),
    Legal((NONPAD,), "cpu", _CPU, _LENGTHS | {SOFTCAP}, (_NO_MEAN, "scale > 0"), _LENGTHS),
    Legal(
        (MASKED, *BLOCKS),
        "cpu",
        _F32,
        _ANY,
        (_NO_MEAN, "scale > 0", "S = T, or no window"),
        _IS_CAUSAL,
    ),
    *(
        Legal((GROUPED,), "cpu", _F32, _CPU_GROUPED, (*_SAME_HEADS, *_ON_CPU), frozenset({must}))
        for must in (CAUSAL, LENGTHS, SINKS)
    ),
    Legal((WITH_ROTARY,), "cpu", _F32, _CPU_GROUPED, (*_WITH_ROTARY, *_ON_CPU), _TURNS),
    Legal(
        (SHARED,), "cpu", _F32, _ANY | {PAST, STATIC}, ("D % 8 = 0", "E = D", _NO_MEAN), _IN_PLACE
    ),
    Legal((MULTI_HEAD,), "cpu", _F32, frozenset(), _EQUAL_HEADS),
    # Attention is an error in onnxruntime where there is no key.
    Legal((PRIMITIVE,), "cpu", _EVERY, _ALL | {EMPTY}),
    Legal(
        (ATTENTION,),
        "cuda",
        _CUDA,
        _ANY | _SINKS | {PAST, STATIC},
        ("no past beside sinks",),
        source="D",
    ),
    Legal(
        (PADDED,), "cuda", _CUDA, _ANY, ("D or E is no multiple of 8", *_WHOLE_HEADS), source="D"
    ),
    Legal(
        (NONPAD,),
        "cuda",
        _CUDA,
        _LENGTHS | {SOFTCAP},
        (_NO_MEAN, "scale > 0"),
        _LENGTHS,
        source="D",
    ),
    # In a prompt, the kernels on CUDA let queries past a length see keys past it: no lengths here.
    Legal((GROUPED,), "cuda", HALF, _BANDED, (*_SAME_HEADS, *_ON_CUDA), _IS_CAUSAL, source="D"),
    Legal((WITH_ROTARY,), "cuda", HALF, _BANDED, (*_WITH_ROTARY, *_ON_CUDA), _TURNS, source="D"),
    # The CPU's kernel has no norms, so what these compute is seen by tests/gpu alone.
    Legal(
        (WITH_NORMS,),
        "cuda",
        HALF,
        _BANDED,
        (*_WITH_ROTARY, *_ON_CUDA),
        frozenset({ROTARY, NORMS}),
        source="D",
    ),
    Legal(
        (SHARED,),
        "cuda",
        HALF,
        _ANY | {PAST, STATIC},
        ("D % 8 = 0", "D ≤ 256", "E = D", "scale > 0", _NO_MEAN),
        _IN_PLACE,
        source="D",
    ),
    # Below SM 80 the op runs memory-efficient attention, which gets no sinks but computes without.
    *(
        Legal(
            (form,),
            "cuda",
            HALF,
            _BANDED | {SINKS},
            (*(_WITH_ROTARY if form.inside else _SAME_HEADS), *_ON_CUDA),
            frozenset({SINKS, *form.inside}),
            sm=80,
            source="S",
        )
        for form in (GROUPED, WITH_ROTARY, WITH_NORMS)
    ),
    Legal((MULTI_HEAD,), "cuda", _CUDA, frozenset(), _EQUAL_HEADS, source="D"),
    Legal((PRIMITIVE,), "cuda", _EVERY, _ALL | {EMPTY}, source="S"),
    Legal((PACKED_ROWS,), "cuda", _F32 | _F16, _IS_PACKED, _EQUAL_HEADS, _IS_PACKED, source="D"),
    Legal((RESTORED_ROWS,), "cuda", _CUDA, _IS_PACKED, (), _IS_PACKED, source="D"),
    Legal((RESTORED_ROWS,), "cpu", _EVERY, _IS_PACKED, (), _IS_PACKED),
)

_FLASH = ("D % 8 = 0", "D ≤ 256", "E = D")
_PADDED_FLASH = ("D ≤ 256", "E = D")
_BOTTOM = ("not causal, or S = T or a past",)
_UNMASKED = ("no mask or bias",)
_BAND = ("no mask or bias but a window",)
_PLAIN = ("no window, softcap or sinks",)
_MEA_KEYS = ("no mask or bias, or T % 4 = 0",)

KERNELS: tuple[Kernel, ...] = (
    # Attention on CUDA asks for Flash, then memory-efficient attention, then runs unfused.
    Kernel((ATTENTION,), "cuda", HALF, "Flash", 10, (*_FLASH, *_UNMASKED, *_BOTTOM), sm=80),
    Kernel((PADDED,), "cuda", HALF, "Flash", 11, (*_PADDED_FLASH, *_UNMASKED, *_BOTTOM), sm=80),
    Kernel((ATTENTION,), "cuda", HALF, "memory-efficient", 20, (*_BY_8, *_MEA_KEYS)),
    Kernel((ATTENTION,), "cuda", _F32, "memory-efficient", 20, ("H = G", *_BY_8, *_MEA_KEYS)),
    Kernel((PADDED,), "cuda", HALF, "memory-efficient", 21, _MEA_KEYS),
    Kernel((PADDED,), "cuda", _F32, "memory-efficient", 21, ("H = G", *_MEA_KEYS)),
    Kernel((ATTENTION,), "cuda", _CUDA, "unfused", 30),
    Kernel((PADDED,), "cuda", _CUDA, "unfused", 31),
    Kernel((NONPAD,), "cuda", HALF, "Flash", 10, _FLASH, sm=80),
    Kernel((NONPAD,), "cuda", HALF, "memory-efficient", 20, _BY_8),
    Kernel((NONPAD,), "cuda", _F32, "memory-efficient", 20, ("H = G", *_BY_8)),
    Kernel((NONPAD,), "cuda", _CUDA, "unfused", 30),
    Kernel((GROUPED,), "cuda", HALF, "cuDNN", 12, _PLAIN, sm=90),
    Kernel((GROUPED,), "cuda", HALF, "Flash", 12, sm=80),
    Kernel((GROUPED,), "cuda", HALF, "memory-efficient", 19, ("a window",)),
    Kernel((GROUPED,), "cuda", HALF, "memory-efficient", 22),
    Kernel((SHARED,), "cuda", HALF, "XQA or Flash", 5, _BAND, sm=80),
    Kernel((SHARED,), "cuda", HALF, "memory-efficient", 6, _BAND),
    Kernel((SHARED,), "cuda", HALF, "unfused", 7),
    # Each of the launches that it saves is more than its copy of keys and values costs.
    Kernel((WITH_ROTARY,), "cuda", HALF, "cuDNN", 9, _PLAIN, sm=90),
    Kernel((WITH_ROTARY,), "cuda", HALF, "Flash", 9, sm=80),
    Kernel((WITH_ROTARY,), "cuda", HALF, "memory-efficient", 18),
    Kernel((WITH_NORMS,), "cuda", HALF, "cuDNN", 8, _PLAIN, sm=90),
    Kernel((WITH_NORMS,), "cuda", HALF, "Flash", 8, sm=80),
    Kernel((WITH_NORMS,), "cuda", HALF, "memory-efficient", 17),
    Kernel((MULTI_HEAD,), "cuda", HALF, "cuDNN", 12, sm=90),
    Kernel((MULTI_HEAD,), "cuda", HALF, "Flash", 12, _FLASH, sm=80),
    Kernel((MULTI_HEAD,), "cuda", _CUDA, "memory-efficient or unfused", 29),
    Kernel((PACKED_ROWS,), "cuda", _F16, "Flash", 9, _FLASH, sm=80),
    Kernel((PACKED_ROWS,), "cuda", _F16, "TensorRT or memory-efficient", 19, _BY_8),
    Kernel((PACKED_ROWS,), "cuda", _F32, "memory-efficient", 19, (*_BY_8, "S ≥ 256")),
    Kernel((PACKED_ROWS,), "cuda", _F32 | _F16, "unfused", 31),
    Kernel((RESTORED_ROWS,), "cuda", HALF, "Flash", 12, _FLASH, sm=80),
    Kernel((RESTORED_ROWS,), "cuda", HALF, "memory-efficient", 22, _BY_8),
    Kernel((RESTORED_ROWS,), "cuda", _F32, "memory-efficient", 22, ("H = G", *_BY_8)),
    Kernel((RESTORED_ROWS,), "cuda", _CUDA, "unfused", 32),
    Kernel((PRIMITIVE,), "cuda", _EVERY, "separate kernels", 40, source="S"),
    Kernel((ATTENTION, RESTORED_ROWS), "cpu", _CPU, "CPU Attention", 20, source="R"),
    Kernel((ATTENTION, RESTORED_ROWS), "cpu", _EVERY, "separate kernels", 40, source="R"),
    Kernel((MASKED, *BLOCKS), "cpu", _CPU, "CPU Attention", 20, source="R"),
    Kernel((SHARED,), "cpu", _F32, "CPU GroupQueryAttention", 10, source="R"),
    Kernel((NONPAD,), "cpu", _CPU, "CPU Attention", 20, source="R"),
    Kernel((GROUPED,), "cpu", _CPU, "CPU GroupQueryAttention", 20, source="R"),
    # Two operators less, and no time less: measured at 1 to 1024 queries.
    Kernel((WITH_ROTARY,), "cpu", _CPU, "CPU GroupQueryAttention", 21, source="R"),
    Kernel((MULTI_HEAD,), "cpu", _CPU, "CPU Flash", 20, source="R"),
    Kernel((PRIMITIVE,), "cpu", _EVERY, "separate kernels", 41, source="R"),
)
