"""The fuzz draws what it says, finds what is planted, and finds nothing in a few fixed draws."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attngraph.analysis.attention import site
from attngraph.analysis.attention.logits import Logits
from attngraph.passes.rewriting.evidence import Evidence
from attngraph.passes.rewriting.outcomes import Equal
from tests.fuzz import results, trial
from tests.fuzz.choices import CHOICES
from tests.fuzz.decoding import DECODERS
from tests.fuzz.grammar import Grammar
from tests.fuzz.grammars import GRAMMARS
from tests.fuzz.inputs import STYLES, cases, make
from tests.fuzz.oracle import EPS, ROUNDINGS, Forward, Oracle, Rounding, over
from tests.fuzz.relations import broken, unlike_at_once
from tests.fuzz.source import ATTENTIONS, write
from tests.fuzz.sweep import Worker, of_draw, of_seed, table
from tests.fuzz.trial import FAILURES

pytestmark = pytest.mark.wide

SEEDS = (0, 1, 7, 8, 26)  # one layer each, static and dynamic, masked and not
MANY = range(300)


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_a_draw_is_settled_and_a_seed_always_the_same(grammar: Grammar) -> None:
    for seed in MANY:
        drawn = grammar.draw(seed)
        assert grammar.settle(drawn) == drawn
        assert grammar.draw(seed) == drawn


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_every_option_is_drawn(grammar: Grammar) -> None:
    drawn = [grammar.draw(seed) for seed in range(4000)]
    for name, options in grammar.choices.items():
        assert {one[name] for one in drawn} == {*options}, name


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_draw_is_a_module_that_runs(name: str) -> None:
    """At the sample's sizes and at the others."""
    for seed in range(0, 90 if name == "stacks" else 240, 3):
        source: dict[str, Any] = {}
        exec(GRAMMARS[name].write(GRAMMARS[name].draw(seed)), source)
        module = source.get("Whole", source["Model"])().eval()
        inputs, sizes = source["INPUTS"], source["SIZES"]
        free = dict.fromkeys(source["DYNAMIC"].split(), (1, 9))
        with torch.no_grad():
            module(*make(inputs, sizes))
            for _, tensors in cases(inputs, sizes, free):
                module(*tensors)


def test_each_option_changes_the_source() -> None:
    """Of the choices that mean something beside the defaults."""
    plain = write(ATTENTIONS.settle({}))
    for name, options in CHOICES.items():
        for option in options[1:]:
            one = ATTENTIONS.settle({**ATTENTIONS.settle({}), name: option})
            assert (write(one) == plain) == (one == ATTENTIONS.settle({})), (name, option)
            ast.parse(write(one))


def test_masks_of_every_style_are_made() -> None:
    sizes = {"b": 3, "s": 4}
    (hidden,) = make({"m": "b s:padding"}, sizes, "hidden")
    assert not hidden[-1].any()
    assert hidden[0].any()
    (all_valid,) = make({"m": "b s:padding"}, sizes, "all")
    assert all_valid.all()
    assert len({str(make({"m": "b s:padding"}, sizes, style)) for style in STYLES}) == len(STYLES)


def test_simpler_draws_have_fewer_choices_left() -> None:
    drawn = ATTENTIONS.draw(4)
    for less in ATTENTIONS.simpler(drawn):
        assert less != drawn


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_found_in_a_few_draws(seed: int, tmp_path: Path) -> None:
    record = of_draw(ATTENTIONS, ATTENTIONS.draw(seed), tmp_path / f"{seed}.py")
    assert record["outcome"] not in FAILURES, record


@pytest.mark.parametrize("seed", [3, 35])  # growing, of tensors; static, of pairs
def test_nothing_is_found_in_a_few_decoders(seed: int, tmp_path: Path) -> None:
    record = of_draw(DECODERS, DECODERS.draw(seed), tmp_path / f"{seed}.py")
    assert record["outcome"] == "fused", record


@pytest.mark.slow
@pytest.mark.parametrize("seed", [19, 91, 94])
def test_sinks_joined_to_scores_in_exponentials_fuse(seed: int, tmp_path: Path) -> None:
    record = of_draw(DECODERS, DECODERS.draw(seed), tmp_path / f"{seed}.py")
    assert record["outcome"] == "fused", record


def test_codes_of_a_scaled_weight_without_its_norm_are_known(tmp_path: Path) -> None:
    """In floats the weight before it is a norm's, too; a product of an epsilon is no attention."""
    record = of_draw(DECODERS, DECODERS.draw(57), tmp_path / "57.py")
    assert record["outcome"] == "declined", record


MENDED: tuple[dict[str, str], ...] = (
    {"dynamic": "s t p", "bias": "table", "mask": "chunk", "fill": "lowest", "softmax": "lse"},
    {"bias": "given lowest", "after": "guarded", "option": "fp16"},
    {"layout": "loop", "norm": "l2", "bias": "sliced", "softmax": "exp"},
    {"mask": "lengths", "applied": "times", "fill": "lowest", "after": "masked, renormalised"},
    {"keys": "cache", "dynamic": "b", "norm": "l2", "bias": "alibi", "softmax": "lse"},
    {"mask": "given", "after": "where any"},
    {"sizes": "all equal", "layout": "merged", "mask": "given", "mask 2": "window"}
    | {"joined": "times", "softmax": "lse"},
    {"layout": "merged", "groups": "expand", "norm": "l2", "softmax": "lse"},
)
"""Draws that failed, made small: one for each cause."""


@pytest.mark.slow
def test_one_element_of_a_batch_is_tried_in_little_time(tmp_path: Path) -> None:
    """It says little of which query and key a recurrence has: a compile took 150 s. Exponentials
    of scores at -1e4 are 0 in every key of a row, which a softmax isn't, so they stay.
    """
    drawn = {"sizes": "one of a batch", "projection": "split", "layout": "loop", "groups": "one"}
    drawn |= {"norm": "l2", "bias": "given", "mask": "lengths", "fill": "-1e4", "softmax": "exp"}
    drawn |= {"gate": "sigmoid", "around": "pre-norm"}
    record = of_draw(ATTENTIONS, ATTENTIONS.settle(drawn), tmp_path / "again.py")
    assert record["outcome"] == "declined", record
    assert record["seconds"] < 60


@pytest.mark.slow
@pytest.mark.parametrize("drawn", MENDED, ids=lambda drawn: ", ".join(drawn.values()))
def test_what_failed_fuses(drawn: dict[str, str], tmp_path: Path) -> None:
    record = of_draw(ATTENTIONS, ATTENTIONS.settle(drawn), tmp_path / "again.py")
    assert record["outcome"] == "fused", record


@pytest.mark.parametrize(
    "drawn",
    [
        # leading frames of silence make no difference behind a running mean
        {"front": "frames", "block 3": "running mean", "block 4": "masked conv", "mask": "energy"}
        | {"without": "none if all", "dynamic": "b s"},
        # rows of padding are unspecified on another target, too
        {"block 3": "latents", "mask": "bool", "option": "padded rows", "relation": "cuda"},
    ],
    ids=["energy", "cuda"],
)
def test_what_failed_in_stacks_is_right(drawn: dict[str, str], tmp_path: Path) -> None:
    stacks = GRAMMARS["stacks"]
    record = of_draw(stacks, stacks.settle(drawn), tmp_path / "again.py")
    assert record["outcome"] not in FAILURES, record


def test_a_record_counts_in_the_table() -> None:
    found = {
        "outcome": "wrong",
        "said": "",
        "declined": {"no-values": ""},
        "kernels": ["Attention"],
    }
    text = table([found, {**found, "outcome": "fused", "declined": {}}])
    assert "wrong" in text
    assert "no-values" in text


def test_a_run_that_breaks_a_relation_is_told() -> None:
    """Of relations that eager follows; a mean over the batch follows none of parts."""
    inputs, free = {"x": "b s m", "present": "b s:padding"}, {"b": (1, 9), "s": (1, 9)}
    tensors = make(inputs, {"b": 3, "s": 4, "m": 2})

    def double(x: torch.Tensor, present: torch.Tensor) -> list[torch.Tensor]:
        return [2 * x]

    def told(run: Forward, eager: Forward) -> set[str]:
        oracle = Oracle(_Calling(eager), _Calling(eager), Rounding())
        found = broken(run, oracle, inputs, tensors, free)
        return {said.partition(":")[0] for said in found}

    ordered, parts, padded, cut = (
        "a batch in another order", "a batch in parts", "a sequence with more padding",
        "a sequence cut short",
    )  # fmt: skip
    assert told(double, double) == set()
    assert told(lambda x, _: [x + x[:1]], double) == {ordered, parts}
    assert told(lambda x, _: [x + x.mean(1, keepdim=True)], double) == {padded, cut}
    assert told(lambda x, _: [x + x[:1]], lambda x, _: [x + x.mean(0)]) == {ordered}


def test_logits_that_follow_the_pieces_of_a_prompt_are_told() -> None:
    oracle = Oracle(module := _Calling(lambda x: [x.cumsum(1)]), module, Rounding())
    x = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0))

    def told(pieces: Forward) -> list[str]:
        return [*unlike_at_once(pieces, oracle, oracle, module, (x,))]

    assert not told(lambda x: [x.double().cumsum(1).float()])
    assert told(lambda x: [torch.cat([x[:, :4].cumsum(1), x[:, 4:].cumsum(1)], 1)])


@pytest.mark.parametrize(("gain", "passes"), [(100.0, False), (1e5, True)])
def test_a_relation_is_held_to_what_the_model_amplifies(gain: float, passes: bool) -> None:
    inputs, tensors = {"x": "b s m"}, make({"x": "b s m"}, {"b": 3, "s": 4, "m": 2})
    module = _Calling(lambda x: [(gain * x).sin()])

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [(gain * x).sin() + 1e-3 * (x[:1] > 0)]

    found = [*broken(run, Oracle(module, module, Rounding()), inputs, tensors, {})]
    assert (not found) is passes, found


def _oracle_of(module: torch.nn.Module) -> Oracle:
    module = module.requires_grad_(False)
    return Oracle(module, copy.deepcopy(module).double(), Rounding())


class _Calling(torch.nn.Module):
    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def test_what_a_report_states_is_right_beside_eager_and_nothing_else() -> None:
    class Sum(torch.nn.Module):
        def __init__(self, addend: float) -> None:
            super().__init__()
            self.addend = addend

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.addend

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cat([x[:1] + 1, x[1:] + 2])]

    x = torch.randn(2, 3)
    one, two, three = (Oracle(Sum(n), Sum(n), Rounding()) for n in (1.0, 2.0, 3.0))
    assert one.differs(run, (x,), "")
    assert not Oracle(one.module, one.doubled, Rounding(), two).differs(run, (x,), "")
    assert Oracle(one.module, one.doubled, Rounding(), three).differs(run, (x,), "")


def test_where_eager_overflows_float64_is_right_too() -> None:
    """On the way to a small number as well; what is not finite is right beside large ones only."""
    exact, eager = torch.tensor([2e25, 1.0], dtype=torch.float64), torch.tensor([torch.nan, 1.0])
    assert not over(exact.float(), exact, [eager])
    assert over(exact.float() * 1.1, exact, [eager])
    small = exact / 1e20
    assert not over(small.float(), small, [eager])
    assert over(small.float() * 1.1, small, [eager])
    assert over(torch.full((2,), torch.inf), small, [eager])


def test_what_cancels_may_leave_rounding_and_what_is_small_may_not() -> None:
    class Left(torch.nn.Module):
        """Rows less their mean, which are equal; beside them, what is as small and is no rest."""

        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.tensor([0.1, 0.7, 0.3]))

        def forward(self, x: Tensor) -> Tensor:
            rows = self.bias.sin() + 0 * x
            rest = rows - rows.cumsum(1)[:, -1:] / x.shape[1]
            return torch.cat([rest, 1e-8 * rows], 1)

    x = torch.randn(2, 11, 3)
    oracle = _oracle_of(Left())
    rest = (torch.arange(22) < 11)[:, None]

    def told(off: Tensor) -> bool:
        return bool(oracle.differs(lambda t: [oracle.module(t) + off], (x,), "off"))

    rounding = oracle.module.bias.sin() * EPS / 2
    assert not told(rounding * rest)
    assert told(100 * rounding * rest)
    assert told(rounding * ~rest)


def test_rows_in_8_bits_may_lose_what_is_below_a_step_and_no_more() -> None:
    """Two large features cancel; a step of their row is more than any of the others."""
    torch.manual_seed(0)
    module = torch.nn.Linear(256, 1, bias=False).requires_grad_(False)
    module.weight.copy_(torch.tensor([[1.0, -1.0]]).expand(128, 2).reshape(1, 256))
    x = torch.rand(64, 256) - 0.5
    x[:, :2] = 100.0
    step = x.abs().amax(-1, keepdim=True) / 127
    oracle = Oracle(module, copy.deepcopy(module).double(), ROUNDINGS["int8"])
    assert not oracle.differs(lambda x: [module((x / step).round() * step)], (x,), "")
    assert oracle.differs(lambda x: [module(x) + 128 * step], (x,), "")


def test_sizes_that_a_file_refuses_are_not_tried() -> None:
    free = {"s": (1, 9)}
    labels = [label for label, _ in cases({"x": "s"}, {"s": 4}, free, lambda sizes: sizes["s"] < 9)]
    assert "s=1, all" in labels
    assert not [label for label in labels if "s=9" in label]


def _recorded(seed: int, outcome: str) -> dict[str, Any]:
    known = {"said": "", "small": {"mask": "window"}, "declined": {"no-values": ""}}
    return {
        "grammar": "attentions",
        "seed": seed,
        "outcome": outcome,
        "seconds": float(seed),
        **known,
    }


def test_results_go_on_where_the_last_run_ended(tmp_path: Path) -> None:
    """A piece per commit; a failure counts until it is right when tried again."""
    path = tmp_path / "fuzz.json"
    kept = results.read(path)
    for seed, commit in enumerate(("a", "a", "b")):
        assert results.next_seed(kept, "attentions") == seed
        results.add(kept, _recorded(seed, "wrong" if seed == 1 else "declined"), commit)
    results.write(kept, path)
    kept = results.read(path)
    assert [(p["commit"], p["first"], p["draws"]) for p in kept["pieces"]] == [
        ("a", 0, 2),
        ("b", 2, 1),
    ]
    assert "| attentions 1 | wrong | mask: window | **no** |" in results.page(kept)
    results.again(kept, lambda failure: {"outcome": "fused"}, "c")
    page = results.page(kept)
    assert "1 draws failed when they were first tried; 0 still do" in page
    assert "3 draws" in page
    assert "`no-values` 3" in page


@pytest.mark.slow
def test_a_process_that_ends_is_a_crash_and_is_replaced(tmp_path: Path) -> None:
    (path := tmp_path / "dies.py").write_text("import os\nos._exit(3)\n")
    worker = Worker(timeout=60)
    assert worker(path)["outcome"] == "crashed"
    assert worker(path)["outcome"] == "crashed"


def _no_masks(logits: Any) -> Any:
    return replace(logits, steps=()) if isinstance(logits, Logits) else logits


def _no_scale(logits: Any) -> Any:
    return replace(logits, scale=1.0) if isinstance(logits, Logits) else logits


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The compiler without its own checks: what is found, the trial found."""
    monkeypatch.setattr(Evidence, "_compare", lambda *_: Equal())
    monkeypatch.setattr(trial, "optimize", functools.partial(trial.optimize, verify="off"))
    return monkeypatch


def _plant(change: Callable[[Any], Any], patch: pytest.MonkeyPatch) -> None:
    read = site.read_logits
    patch.setattr(site, "read_logits", lambda *args, **more: change(read(*args, **more)))


@pytest.mark.defect
@pytest.mark.parametrize("change", [_no_masks, _no_scale])
def test_a_planted_defect_is_found(
    change: Callable[[Any], Any], unchecked: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _plant(change, unchecked)
    found = (
        of_draw(ATTENTIONS, ATTENTIONS.draw(seed), tmp_path / f"{seed}.py")["outcome"]
        for seed in range(12)
    )
    assert "wrong" in found


@pytest.mark.defect
@pytest.mark.slow
def test_a_planted_defect_is_made_small(unchecked: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _plant(_no_masks, unchecked)
    seed = next(
        s
        for s in MANY
        if ATTENTIONS.draw(s)["mask"] == "window" and ATTENTIONS.draw(s)["softmax"] != "sdpa"
    )
    record = of_seed("attentions", seed, tmp_path)
    assert record["outcome"] == "wrong"
    assert record["small"].keys() == {"mask"}
    assert (tmp_path / f"attentions-{seed}-small.py").exists()
