"""Options of a session: each is checked before onnxruntime, which would run on the CPU, sees it."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

import attngraph
from attngraph.errors import ProviderError, UsageError
from attngraph.export.runtime import replay as replay_module
from attngraph.export.runtime import session as session_module
from attngraph.export.runtime.arguments import Argument
from attngraph.export.runtime.denormals import denormals, flushed
from attngraph.export.runtime.provider_options import PROVIDER_OPTIONS, provider_options
from attngraph.export.runtime.replay import Fixed, Replay
from attngraph.export.runtime.session import Session, elsewhere
from attngraph.export.target import Target
from tests.export.runtime.test_session import model

CPU, CUDA = Target("cpu"), Target("cuda")
CUDA_LIBRARY = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"


def _opened(**options: Any) -> onnxruntime.SessionOptions:
    with Session.open(model(), CPU, **options) as session:
        assert session._session is not None
        return session._session.get_session_options()


def test_threads_and_spinning_reach_onnxruntime() -> None:
    options = _opened(threads=2, spinning=False, graph_optimization="basic")
    assert options.intra_op_num_threads == 2
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    basic = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert options.graph_optimization_level == basic


def test_by_default_there_are_as_many_threads_as_torch_has() -> None:
    options = _opened()
    assert options.intra_op_num_threads == torch.get_num_threads()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"


@pytest.mark.parametrize("flush", [True, False])
def test_denormals_are_zero_in_every_thread_and_stay_in_the_caller(flush: bool) -> None:
    x = torch.full((1 << 16, 3), 1e-41)
    with Session.open(model("Sqrt"), CPU, threads=2, flush_denormals=flush) as session:
        assert not flushed()
        (roots,) = session.run([x])
        assert not flushed()
        with denormals(flush=True):
            session.run([x])
            assert flushed()
    assert bool((roots == 0).all()) is flush
    assert bool((roots != 0).all()) is not flush


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads is 0; it must be 1 or more"),
        ({"threads": True}, "threads is True"),
        ({"graph_optimization": "best"}, "it can be all, basic, off"),
        ({"cuda_graph": True}, "cuda_graph is for target cuda, not for cpu"),
        ({"provider_options": {"device_id": 0}}, "CPUExecutionProvider has no option 'device_id'"),
    ],
)
def test_what_a_cpu_session_cannot_take_is_a_sentence(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Session.open(model(), CPU, **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": 1}, "has no option 'device' .* it has arena_extend_strategy, .*device_id"),
        ({"device_id": -1}, "device_id is -1; it must be a number, 0 or more"),
        ({"device_id": True}, "device_id is True; it must be a number"),
        ({"prefer_nhwc": "yes"}, "prefer_nhwc is 'yes'; it must be True or False"),
        ({"arena_extend_strategy": "all"}, "one of kNextPowerOfTwo, kSameAsRequested"),
        ({"enable_cuda_graph": 1}, "is set by cuda_graph=True or False"),
        ({"use_tf32": 1}, "is set by tf32=True or False"),
    ],
)
def test_what_the_cuda_provider_cannot_take_is_a_sentence(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Session.open(model(), CUDA, provider_options=given)


def test_options_are_written_as_onnxruntime_reads_them() -> None:
    given = {"device_id": 1, "prefer_nhwc": True, "cudnn_conv_algo_search": "HEURISTIC"}
    assert provider_options(CUDA, given, tf32=False, cuda_graph=True) == {
        "device_id": "1",
        "use_tf32": "0",
        "enable_skip_layer_norm_strict_mode": "1",
        "enable_cuda_graph": "1",
        "prefer_nhwc": "1",
        "cudnn_conv_algo_search": "HEURISTIC",
    }
    assert provider_options(CPU, None, tf32=False, cuda_graph=False) == {}


@pytest.mark.skipif(not CUDA_LIBRARY.exists(), reason="this onnxruntime has no CUDA provider")
def test_the_installed_cuda_provider_knows_every_option_we_let_through() -> None:
    with CUDA_LIBRARY.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
        unknown = [name for name in PROVIDER_OPTIONS["cuda"] if text.find(name.encode()) < 0]
    assert unknown == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has CUDA here")
def test_a_cuda_graph_needs_a_torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    providers = ["CUDAExecutionProvider"]
    monkeypatch.setattr(session_module.onnxruntime, "get_available_providers", lambda: providers)
    with pytest.raises(UsageError, match="needs a PyTorch with CUDA"):
        Session.open(model(), CUDA, cuda_graph=True)


@pytest.fixture
def replaying() -> Session:
    session = Session.open(model("Add", {"a": [2, 3], "b": [2, 3]}), CPU)
    session._outputs = tuple(Argument(put.name, put.dtype, (2, 3)) for put in session._outputs)
    session._replay_on(torch.device("cpu"))
    return session


def test_a_replay_gives_new_tensors_and_reads_the_inputs_of_its_own_run(
    replaying: Session,
) -> None:
    a, b = torch.ones(2, 3), torch.full((2, 3), 2.0)
    (first,) = replaying.run([a, b])
    (second,) = replaying.run([b, b])
    assert torch.equal(first, torch.full((2, 3), 3.0))
    assert torch.equal(second, torch.full((2, 3), 4.0))


def test_replays_of_several_threads_take_turns(replaying: Session) -> None:
    wrong: list[float] = []

    def work(number: float) -> None:
        x = torch.full((2, 3), number)
        for _ in range(100):
            if not torch.equal(replaying.run([x, x])[0], x + x):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(float(seed),)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_replay_keeps_bools_and_a_failure_is_a_sentence(replaying: Session) -> None:
    opened = Session.open(model("Not", {"x": [3]}, torch.bool), CPU)._session
    assert opened is not None
    fixed = Fixed("x", torch.bool, (3,))
    replay = Replay(opened, [fixed], [Fixed("y", torch.bool, (3,))], torch.device("cpu"))
    (y,) = replay.run([torch.tensor([True, False, True])])
    assert y.tolist() == [False, True, False]
    with pytest.raises(UsageError, match="shape"):
        replaying.run([torch.ones(2, 2), torch.ones(2, 2)])


@pytest.mark.parametrize("shape", [("batch", 3), (None,), None])
def test_a_replay_needs_static_shapes(shape: tuple[Any, ...] | None) -> None:
    with pytest.raises(UsageError, match="needs static shapes, and the input 'x' has shape"):
        Fixed.of("input", "x", torch.float32, shape)


def test_a_session_without_cuda_graph_has_no_replay() -> None:
    with Session.open(model(), CPU) as session:
        assert session._replay is None
    assert replay_module.Fixed.of("output", "y", torch.int64, ()).shape == ()


def test_placement_says_which_ops_run_where() -> None:
    session = Session.open(model("Neg"), CPU)
    assert session.placement == {"CPUExecutionProvider": {"Neg": 1}}
    assert elsewhere(session) == []
    session.provider = "CUDAExecutionProvider"
    assert elsewhere(session) == [
        "On CUDAExecutionProvider, 1 of 1 nodes run on CPUExecutionProvider: 1 Neg."
    ]
    session.close()
    with pytest.raises(UsageError, match="closed"):
        _ = session.placement


def test_placement_counts_all_parts_of_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's provider takes each node as a part of its own."""
    session = Session.open(model("Neg"), CPU)
    said = session._session
    assert said is not None
    parts = said.get_provider_graph_assignment_info() * 2
    monkeypatch.setattr(said, "get_provider_graph_assignment_info", lambda: parts)
    assert session.placement == {"CPUExecutionProvider": {"Neg": 2}}


def test_a_provider_that_fails_keeps_its_reason() -> None:
    """Options pass the check, and what fails afterwards is the provider's own matter."""
    if torch.cuda.is_available():
        pytest.skip("CUDA may work here")
    with pytest.raises(ProviderError, match="cuda"):
        Session.open(model(), CUDA, provider_options={"device_id": 0, "prefer_nhwc": False})


class _LogOfMask(torch.nn.Module):
    """AllenNLP's masked softmax: log(mask + 1e-45) is -103 where a mask hides."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x + (mask + 1e-45).log()).softmax(-1)


def test_a_denormal_number_of_the_model_is_kept() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    optimized = attngraph.optimize(_LogOfMask(), (x, torch.ones(2, 3)))
    torch.testing.assert_close(optimized(x, mask), _LogOfMask()(x, mask))
    assert any("denormal number" in note for note in optimized.report.notes)
