"""What rounding excuses, and that it excuses nothing else: modules that are changed a little."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.fuzz.inputs import cases
from tests.fuzz.oracle import EPS, Oracle, Rounding, doubled, flat
from tests.fuzz.rounded import rounded
from tests.fuzz.source import ATTENTIONS, write
from tests.fuzz.trial import _load, _module

ADDED = {"mask": "lengths", "applied": "add float", "fill": "-1e9"}
SCALED = {**ADDED, "scale": "masked *"}
WINDOW = {**ADDED, "mask": "window"}
PADDING = {"mask": "padding", "mask 2": "causal", "applied": "add where", "fill": "-1e4"}
_WEIGHTS = r"w = scores\.softmax\(-1\)"
_HIDDEN = "(scores.amax(-1, keepdim=True) > -1e3)"


def _told(drawn: dict[str, str], change: tuple[str, str], path: Path, peak: float = 1.0) -> str:
    """What the oracle says of a module whose source is changed; `peak` multiplies its scores."""
    text = write(ATTENTIONS.settle(drawn))
    changed = re.sub(*change, text)
    assert changed != text
    path.write_text(text)
    source = _load(path)
    module = _module(source)
    module.q.weight.mul_(peak)  # type: ignore[union-attr, operator]
    path.write_text(changed)
    other: nn.Module = _module(_load(path))
    other.load_state_dict(module.state_dict())
    oracle = Oracle(module, doubled(text, module), Rounding())
    found = [
        oracle.differs(lambda *given: flat(other(*given)), given, label)
        for label, given in cases(source.INPUTS, source.SIZES, {})
    ]
    return "; ".join(filter(None, found))


@pytest.mark.parametrize(
    ("drawn", "change"),
    [
        pytest.param(WINDOW, ("< 3", "< 4"), id="a longer window"),
        pytest.param(WINDOW, ("rows >= columns", "rows > columns"), id="a stricter mask"),
        pytest.param(ADDED, ("columns < lengths", "columns <= lengths"), id="one more key"),
        pytest.param(ADDED, (r"-1e9\b", "0.0"), id="no mask"),
        pytest.param(ADDED, (r"-1e9\b", "-10.0"), id="a weak fill"),
        pytest.param(ADDED, (r"-1e9\b", "-1e6"), id="a fill that leaves scores of hidden rows"),
        pytest.param(ADDED, (_WEIGHTS, f"w = scores.softmax(-1) * {_HIDDEN}"), id="rows of zeros"),
        pytest.param(SCALED, (_WEIGHTS, f"w = scores.softmax(-1) * {_HIDDEN}"), id="scaled, zeros"),
        pytest.param(PADDING, (_WEIGHTS, f"w = scores.softmax(-1) * {_HIDDEN}"), id="-1e4, zeros"),
        pytest.param(PADDING, (r"-1e4\b", "-4.0"), id="a fill of the scores' own size"),
        pytest.param(ADDED, (r"\* 0\.3\b", "* 0.3003"), id="a scale"),
    ],
)
def test_a_module_that_is_another_is_told(
    drawn: dict[str, str], change: tuple[str, str], tmp_path: Path
) -> None:
    assert _told(drawn, change, tmp_path / "module.py")


NO_KEY_BIAS = (r"k = self\.k\(y\)", "k = F.linear(y, self.k.weight)")
SCALED_FIRST = (
    r"(scores = scores \+ .*) \* -1e9\n        scores = scores \* 0\.3",
    r"scores = scores * 0.3\n        \1 * -3e8",
)


@pytest.mark.parametrize("exact", [False, True], ids=["rounded", "as it is"])
@pytest.mark.parametrize(
    ("drawn", "change", "peak"),
    [
        pytest.param(ADDED, NO_KEY_BIAS, 30.0, id="keys without their bias"),
        pytest.param(SCALED, SCALED_FIRST, 30.0, id="a fill that is scaled beforehand"),
    ],
)
def test_a_fill_that_leaves_multiples_of_64_is_not_held_to_them(
    drawn: dict[str, str],
    change: tuple[str, str],
    peak: float,
    exact: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows whose keys are all hidden, with scores of 32 and more."""
    if exact:
        monkeypatch.setattr(Oracle, "rounded", lambda self, given, seed: self(*given))
    assert bool(_told(drawn, change, tmp_path / "module.py", peak)) is exact


def test_runs_are_a_few_roundings_apart() -> None:
    """Of a layer with an attention, norms and an LSTM behind it, whose ops are fused in eager."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    model = nn.Sequential(layer, nn.LSTM(16, 8, batch_first=True)).eval().requires_grad_(False)
    x = torch.randn(2, 5, 16)
    eager, runs = model(x)[0], []
    for seed in range(3):
        with rounded(seed):
            runs.append(model(x)[0])
    off = [float((run - eager).abs().max() / eager.abs().max()) for run in runs]
    assert min(off) > 0.5 * EPS
    assert max(off) < 32 * EPS
    assert torch.equal(model(x)[0], eager)


def test_what_is_exact_stays_so() -> None:
    """Fills, whole numbers, powers of two, and a small addend that a large number takes whole."""
    x = torch.randn(3, 4).round()
    hidden = torch.tensor([[True], [False], [True]])

    def run() -> torch.Tensor:
        scores = (2 * x + 1).masked_fill(hidden, -1e9)[:, [3, 2, 1, 0]] * 0.5
        return (scores + 3.0 * x.sin())[hidden[:, 0]]

    with rounded(0):
        assert torch.equal(run(), torch.full((2, 4), -5e8))
