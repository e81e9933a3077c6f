"""Sessions: torch in, torch out, on the provider that was asked for, or an error that says why."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from attngraph.errors import LoadError, ProviderError, UsageError
from attngraph.export.runtime import session as session_module
from attngraph.export.runtime.providers import onnxruntime_messages
from attngraph.export.runtime.session import Session
from attngraph.export.target import COMPUTE_CAPABILITIES, Target, parse_target

CPU = Target("cpu")
CODES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.bool: TensorProto.BOOL,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.uint8: TensorProto.UINT8,
}


def model(
    op: str = "Identity",
    inputs: dict[str, list[int | str]] | None = None,
    dtype: torch.dtype = torch.float32,
    outputs: tuple[str, ...] = ("y",),
) -> bytes:
    """One node over inputs of one dtype; an output named like an input passes it through."""
    shapes = inputs or {"x": ["n", 3]}
    node = helper.make_node(op, list(shapes), ["y"])
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, CODES[dtype], s) for n, s in shapes.items()],
        [helper.make_tensor_value_info(n, CODES[dtype], None) for n in outputs],
    )
    opset = [helper.make_opsetid("", 24)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_every_dtype_survives_the_round_trip(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    with Session.open(model(dtype=dtype), CPU) as session:
        (y,) = session.run([x])
    assert y.dtype is dtype
    assert torch.equal(y, x)


def test_outputs_outlive_the_session_and_own_their_memory() -> None:
    x = torch.ones(2, 3)
    session = Session.open(model(outputs=("y", "x")), CPU)
    y, same = session.run({"x": x})
    session.close()
    gc.collect()
    x.zero_()
    assert torch.equal(y, torch.ones(2, 3))
    assert torch.equal(same, torch.ones(2, 3))


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(6.0).reshape(3, 2).t(),
        torch.arange(3.0).expand(4, 3),
        torch.arange(24.0).reshape(4, 6)[:, ::2],
        torch.empty(0, 3),
        torch.nn.Parameter(torch.ones(2, 3)),
    ],
    ids=["transposed", "expanded", "strided", "empty", "requires grad"],
)
def test_any_layout_is_taken(x: torch.Tensor) -> None:
    with Session.open(model(), CPU) as session:
        (y,) = session.run([x])
    assert torch.equal(y, x.detach())


def test_feeds_by_name_come_in_any_order() -> None:
    data = model("Sub", {"a": ["n"], "b": ["n"]})
    with Session.open(data, CPU) as session:
        assert session.input_names == ("a", "b")
        assert session.output_names == ("y",)
        (y,) = session.run({"b": torch.ones(2), "a": torch.full((2,), 3.0)})
    assert torch.equal(y, torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ([torch.ones(2, 3)], r"takes 2 inputs \(a, b\); got 1"),
        ({"a": torch.ones(2, 3), "c": torch.ones(2, 3)}, r"takes the inputs a, b; got a, c"),
        ([torch.ones(2, 3).double(), torch.ones(2, 3)], r"'a' is float64; .* takes float32"),
        ([torch.ones(3), torch.ones(2, 3)], r"'a' has shape \(3,\); the model takes \(n, 3\)"),
        ([torch.ones(2, 4), torch.ones(2, 4)], r"'a' has shape \(2, 4\)"),
        ([torch.ones(2, 3), torch.ones(4, 3)], r"'b' has n = 4 where input 'a' has 2"),
        ([[1.0], torch.ones(2, 3)], r"'a' must be a torch.Tensor, not list"),
    ],
)
def test_inputs_that_dont_fit_are_named(feeds: list[torch.Tensor], message: str) -> None:
    data = model("Add", {"a": ["n", 3], "b": ["n", 3]})
    with Session.open(data, CPU) as session, pytest.raises(UsageError, match=message):
        session.run(feeds)


def test_a_failing_run_is_a_sentence() -> None:
    data = model("MatMul", {"a": ["m", "k"], "b": ["p", "n"]})
    with (
        Session.open(data, CPU) as session,
        pytest.raises(ProviderError, match="failed while running") as caught,
    ):
        session.run([torch.ones(2, 3), torch.ones(4, 2)])
    assert "\n" not in str(caught.value)


def test_a_closed_session_refuses_to_run() -> None:
    session = Session.open(model(), CPU)
    session.close()
    with pytest.raises(UsageError, match="closed"):
        session.run([torch.ones(1, 3)])


def test_files_that_are_no_model_are_load_errors(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no ONNX file .*absent\.onnx"):
        Session.open(tmp_path / "absent.onnx", CPU)
    junk = tmp_path / "junk.onnx"
    junk.write_bytes(b"junk")
    with pytest.raises(LoadError, match=r"junk\.onnx"):
        Session.open(junk, CPU)
    with pytest.raises(LoadError, match="NoSuchOp"):
        Session.open(model("NoSuchOp"), CPU)


def test_an_op_without_a_kernel_is_a_provider_error() -> None:
    data = model("Softmax", dtype=torch.bfloat16)
    with pytest.raises(ProviderError, match="has a kernel of ReduceMax for"):
        Session.open(data, CPU)


def test_a_path_opens_like_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model("Neg"))
    with Session.open(path, CPU, threads=1, graph_optimization="off") as session:
        assert session.provider == "CPUExecutionProvider"
        (y,) = session.run([torch.ones(1, 3)])
    assert torch.equal(y, -torch.ones(1, 3))


def test_threads_share_a_session() -> None:
    data = model("Mul", {"a": ["n"], "b": ["n"]})
    wrong: list[int] = []
    with Session.open(data, CPU) as session:

        def work(seed: int) -> None:
            x = torch.full((50 + seed,), float(seed))
            for _ in range(50):
                (y,) = session.run([x, x])
                if not torch.equal(y, x * x):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, so CUDA may work")
def test_cuda_without_its_libraries_is_an_error_and_not_a_cpu_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ProviderError, match="cuda") as caught:
        Session.open(model(), Target("cuda"))
    assert "pip install" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_wheel_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        session_module.onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"]
    )
    with pytest.raises(ProviderError, match="was built without"):
        Session.open(model(), Target("cuda"))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            "Exception during initialization: transformer_memcpy.cc:253 IsNodeCompatible(…) was "
            "false. Provider type for Atan node with name 'r0.0/Atan' is not set.",
            "no provider has a kernel of Atan for the dtypes that the node 'r0.0/Atan' has",
        ),
        (
            "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for "
            "Gemm(13) node with name 'y/Gemm'",
            "no provider has a kernel of Gemm for the dtypes that the node 'y/Gemm' has",
        ),
        (
            "This is an invalid model. Type Error: Type 'tensor(int64)' of input parameter (x) of "
            "operator (Conv) in node (y/Conv) is invalid.",
            "Conv, which the node 'y/Conv' is, takes no int64, which 'x' is",
        ),
    ],
)
def test_what_an_operator_has_no_kernel_for_is_named(
    told: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError(told)

    monkeypatch.setattr(session_module.onnxruntime, "InferenceSession", fails)
    with pytest.raises(ProviderError, match=said):
        Session.open(model(), CPU)


def test_a_session_on_another_provider_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an unknown provider option, which onnxruntime answers with a CPU session."""
    monkeypatch.setattr(session_module, "preload_cuda", list)
    monkeypatch.setattr(
        session_module,
        "_create",
        lambda data, options, target, extra: onnxruntime.InferenceSession(
            data, options, providers=["CPUExecutionProvider"]
        ),
    )
    monkeypatch.setattr(
        session_module.onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"]
    )
    with pytest.raises(ProviderError, match="fell back to CPUExecutionProvider"):
        Session.open(model(), Target("cuda"))


def test_only_onnxruntimes_lines_are_taken_from_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with onnxruntime_messages() as messages:
        os.write(
            2, b"mine\n2026 [E:onnxruntime:Default, a.cc:1 f()] no with error: libx.so: gone\n"
        )
    assert messages == ["libx.so: gone"]
    assert capfd.readouterr().err == "mine\n"


def test_targets_round_trip() -> None:
    for text in ("cpu", "cuda", *(f"cuda:sm{sm}" for sm in COMPUTE_CAPABILITIES)):
        assert str(parse_target(text)) == text
    assert parse_target("cuda:sm80") == Target("cuda", 80)
    assert parse_target("cuda").execution_provider == "CUDAExecutionProvider"


@pytest.mark.parametrize("text", ["gpu", "cuda:80", "cpu:sm80", "CUDA", "", "cuda:sm0"])
def test_an_unknown_target_lists_what_exists(text: str) -> None:
    with pytest.raises(UsageError, match="use cpu, cuda"):
        parse_target(text)


def test_threads_that_bind_their_tensors_do_not_share_a_binding() -> None:
    """The way of every provider but the CPU's, taken on the CPU."""
    data = model("Add", {"a": ["n", 3], "b": ["n", 3]})
    wrong: list[int] = []
    with Session.open(data, CPU) as session:
        session.provider = "another"

        def work(seed: int) -> None:
            x = torch.full((seed + 1, 3), float(seed))
            wrong.extend(seed for _ in range(50) if not torch.equal(session.run([x, x])[0], x + x))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
