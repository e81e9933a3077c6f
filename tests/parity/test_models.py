"""Every model of the suite, the whole way: all attention fused, within budget, and why it is known.

Each is compiled twice, with its named dims dynamic and with the sizes of its sample. A test holds
one model and what is asked of it, because compiling is what costs the time.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import onnx_ir
import pytest
import torch

import attngraph
from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import Reference, flatten_outputs
from attngraph.optimized import Optimized
from tests.models import CASES, KEPT, Built, Case
from tests.models.kit import HEADS

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[2]
BY_NAME = {case.name: case for case in (*CASES, *KEPT)}

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def _optimize(built: Built, *, dynamic: bool = False, verify: str = "final") -> Optimized:
    shapes = built.dynamic_shapes if dynamic else None
    return attngraph.optimize(built.module, built.args, dynamic_shapes=shapes, verify=verify)


@functools.cache
def _static(case: Case) -> tuple[Built, Optimized]:
    built = case.build()
    return built, _optimize(built)


@each_case
def test_with_dynamic_dims(case: Case) -> None:
    built = case.build()
    optimized = _optimize(built, dynamic=True)
    _assert_reported(built, optimized, sizes=3)
    _assert_masks_matter(built, optimized)
    reference = Reference(built.module, precision="fp32")
    for sizes in built.sizes:
        args = built.inputs(sizes)
        parity = compare(reference(args), optimized.run(args), "fp32")
        assert parity.passed, f"{sizes}: {parity}"


@each_case
def test_with_the_sizes_of_the_sample(case: Case) -> None:
    built, optimized = _static(case)
    _assert_reported(built, optimized, sizes=1)
    _assert_masks_matter(built, optimized)


def _assert_reported(built: Built, optimized: Optimized, *, sizes: int) -> None:
    """Every site fused and located, parity within budget at so many sizes, all figures there."""
    report = optimized.report
    routers = [site for site in report.sites if site.code == "experts-kept"]
    told = [site for site in report.sites if site not in routers]
    assert len(routers) == (built.sites if "GptOss" in str(built.module) else 0)
    assert [site.status for site in told] == ["fused"] * built.sites, report.sites
    assert (report.fused, report.declined) == (built.sites, 0)
    for site in told:
        assert (site.op, site.code) == ("attn.attention", "attention")
        assert f"{HEADS} heads" in site.reason
        path, _, line = site.location.rpartition(":")
        assert path.endswith(".py"), site
        assert int(line) > 0
    assert not built.unmasked or any(site.mask for site in report.sites), report.sites

    parity = report.parity
    assert parity is not None
    assert parity.passed
    assert 0 < parity.error <= parity.budget
    assert parity.reference_error > 0
    assert len({output.case for output in parity.outputs}) > sizes  # and what was drawn

    assert set(report.timings) == {"capture", "passes", "lower", "parity"}
    assert min(report.timings.values()) > 0
    assert report.nodes_before > 0
    assert report.nodes_after > 0
    assert report.weights > 0
    assert report.weight_bytes > 0
    figures = json.loads(json.dumps(report.to_dict()))
    assert figures["attention"] == {"fused": built.sites, "declined": 0}
    assert figures["nodes"] == {"before": report.nodes_before, "after": report.nodes_after}
    assert figures["parity"]["passed"] is True
    assert len(figures["sites"]) == built.sites + len(routers)


def _assert_masks_matter(built: Built, optimized: Optimized) -> None:
    """The control: with a mask dropped the result is out of budget, so parity sees masks."""
    reference = Reference(built.module, precision="fp32")(built.args)
    for name, (module, args) in built.unmasked.items():
        if module is built.module:
            dropped = optimized.run(args)
        else:
            with torch.no_grad():
                dropped = tuple(tensor for _, tensor in flatten_outputs(module(*args)))
        assert not compare(reference, dropped, "fp32").passed, f"the {name} mask goes unseen"


def test_additive_attention_is_right() -> None:
    built = KEPT[0].build()
    optimized = _optimize(built, dynamic=True)
    assert optimized.report.parity is not None
    assert optimized.report.parity.passed
    _assert_masks_matter(built, optimized)


def test_additive_attention_is_declined_by_name() -> None:
    report = _optimize(KEPT[0].build(), verify="off").report
    assert [(site.status, site.code) for site in report.sites] == [("declined", "additive")]
    assert report.sites[0].reason
    assert report.sites[0].hint


SAVED = [("bert-sdpa", False), ("nanogpt", True)]


@pytest.fixture(scope="module")
def of_another_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a process with another hash seed saves, by the names of their models."""
    folder = tmp_path_factory.mktemp("another")
    code = (
        "import sys, attngraph\n"
        "from tests.models import CASES\n"
        f"for name, dynamic in {SAVED}:\n"
        "    built = next(case for case in CASES if case.name == name).build()\n"
        "    shapes = built.dynamic_shapes if dynamic else None\n"
        "    attngraph.optimize(\n"
        "        built.module, built.args, dynamic_shapes=shapes, verify='off'\n"
        "    ).save(f'{sys.argv[1]}/{name}.onnx')\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    return folder


@pytest.mark.parametrize(("name", "dynamic"), SAVED)
def test_the_same_model_gives_the_same_bytes(
    name: str, dynamic: bool, of_another_process: Path, tmp_path: Path
) -> None:
    files = [tmp_path / "0.onnx", tmp_path / "1.onnx", of_another_process / f"{name}.onnx"]
    for path in files[:2]:
        _optimize(BY_NAME[name].build(), dynamic=dynamic, verify="off").save(path)
    first, *others = [path.read_bytes() for path in files]
    assert [content == first for content in others] == [True, True]


@pytest.mark.parametrize("name", ["bert-sdpa", "gpt2-sdpa", "vit-sdpa", "encoder"])
def test_heads_are_never_moved(name: str, tmp_path: Path) -> None:
    """Projections feed the attention op as they come, and it feeds the output projection."""
    built, optimized = _static(BY_NAME[name])
    optimized.save(tmp_path / "model.onnx")
    graph = onnx_ir.load(tmp_path / "model.onnx").graph
    attentions = [node for node in graph if node.op_type == "Attention"]
    assert len(attentions) == built.sites
    for node in attentions:
        assert _above(node) <= {"Split", "Add"}
        assert {user.op_type for user in node.outputs[0].consumers()} == {"MatMul"}


def _above(node: onnx_ir.Node) -> set[str]:
    """The ops between an attention's query, key and value and the products they come from."""
    passed: set[str] = set()
    queue = list(node.inputs[:3])
    while queue:
        value = queue.pop()
        producer = value.producer() if value is not None else None
        if producer is not None and producer.op_type not in ("MatMul", "Gemm"):
            passed.add(producer.op_type)
            queue += producer.inputs
    return passed
