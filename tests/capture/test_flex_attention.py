"""`flex_attention` is traced as what its functions say, and what they say is torch's own eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import attngraph
from attngraph.errors import CaptureError
from attngraph.frontend.capture import capture
from attngraph.frontend.translation.functional import functionalize
from attngraph.inference import inference

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.wide,
]
Function = Callable[..., Tensor]
BIAS = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def nothing(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Of the first query; the others see all."""
    return q > 0


def strictly_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The first query sees no key."""
    return q > k


def relative(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + BIAS.to(score.device)[h, (q - k).clamp(-4, 4) + 4]


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20)


def triangle(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q >= k, score, -float("inf"))


class Flexible(nn.Module):
    def __init__(self, score: Function | None, mask: Function | None, **how: Any) -> None:
        super().__init__()
        self.score, self.mask, self.how = score, mask, how

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        blocks = None
        if self.mask is not None:
            sizes = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
            blocks = create_block_mask(self.mask, *sizes, device="cpu")
        return flex_attention(q, k, v, score_mod=self.score, block_mask=blocks, **self.how)


def tensors(heads: int = 4, batch: int = 2, rows: int = 7, seed: int = 0) -> tuple[Tensor, ...]:
    seeded = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, n, rows, 8, generator=seeded) for n in (4, heads, heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("score", "mask", "how"),
    [
        (None, None, {}),
        (relative, causal, {"scale": 0.3}),
        (softcap, nothing, {"enable_gqa": True}),
        (triangle, None, {"return_aux": AuxRequest(lse=True)}),
        (None, nothing, {"return_aux": AuxRequest(lse=True)}),
    ],
)
def test_it_is_computed_as_eager_does(
    score: Function | None, mask: Function | None, how: dict[str, Any], dtype: torch.dtype
) -> None:
    module = Flexible(score, mask, **how)
    given = [x.to(dtype) for x in tensors(2 if "enable_gqa" in how else 4)]
    with torch.no_grad():
        eager = module(*given)
    with inference(module):
        ours = module(*given)
    torch.testing.assert_close(ours, eager)


def dims(heads: int = 4) -> tuple[Any, ...]:
    batch, rows = Dim("batch", max=8), Dim("rows", min=2, max=64)
    return ({0: batch, 2: rows},) * 3


@pytest.mark.parametrize(
    ("score", "mask", "said"),
    [(triangle, None, "causal"), (None, strictly_causal, "causal with offset -1")],
)
def test_it_is_an_attention_with_its_mask(
    score: Function | None, mask: Function | None, said: str
) -> None:
    module = Flexible(score, mask)
    found = attngraph.optimize(module, tensors(), dynamic_shapes=dims())
    (site,) = found.report.sites
    assert site.status == "fused"
    assert site.mask == said
    assert not found.report.notes
    for batch, rows in ((1, 2), (3, 33)):
        given = tensors(batch=batch, rows=rows, seed=1)
        with torch.no_grad():
            torch.testing.assert_close(found(*given), module(*given))


def test_a_program_that_holds_the_operator_is_written_out() -> None:
    """One that Dynamo traced."""
    module = Flexible(softcap, None, enable_gqa=True)
    with torch.no_grad():
        program = torch.export.export(module, tensors(2), dynamic_shapes=dims(), strict=True)
    assert "higher_order.flex_attention" in program.graph_module.code
    names = [str(node.target) for node in functionalize(program).graph.nodes]
    assert "aten.tanh.default" in names
    assert not any("flex_attention" in name for name in names)


def test_a_torch_without_these_names_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is refused then, and no other model is touched."""
    monkeypatch.delattr(flex_module, "setup_compilation_env")
    with pytest.raises(CaptureError):
        capture(Flexible(softcap, None), tensors())
    assert len(capture(nn.Linear(2, 2), (torch.ones(1, 2),)).graph)


def test_a_compiled_call_of_it_still_runs_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As flex_attention's own documentation says to call it; Dynamo keeps nothing of the trace."""
    module = Flexible(None, causal)
    expected = module(*tensors())
    monkeypatch.setattr(
        f"{__name__}.flex_attention", torch.compile(flex_attention, backend="eager")
    )
    torch.testing.assert_close(module(*tensors()), expected)
    capture(module, tensors())
    torch.testing.assert_close(module(*tensors()), expected)
