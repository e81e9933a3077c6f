"""An onnxruntime session: torch in, torch out, on the provider that was asked for or not at all."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import onnxruntime
import torch

from attngraph.errors import AttngraphError, LoadError, ProviderError, UsageError
from attngraph.export.runtime.arguments import Argument, check_inputs, in_order
from attngraph.export.runtime.denormals import denormals, flushed, kept_by
from attngraph.export.runtime.provider_options import provider_options as checked_options
from attngraph.export.runtime.providers import (
    cuda_install_command,
    onnxruntime_messages,
    preload_cuda,
)
from attngraph.export.runtime.replay import Fixed, Replay, graph_device
from attngraph.export.runtime.saturation import require_exact
from attngraph.export.runtime.session_options import GraphOptimization, session_options
from attngraph.export.runtime.tensors import to_ort, to_torch
from attngraph.export.target import Target
from attngraph.ir.ranges import GUARD_PREFIX
from attngraph.paths import require_file

OrtValue: TypeAlias = onnxruntime.OrtValue
"""A tensor of onnxruntime's, on any device."""

_GUARDED = re.compile(rf"Name:'{GUARD_PREFIX}(.+?)' Status Message")
_NO_KERNEL = re.compile(
    r"(?:Provider type for|Could not find an implementation for) (\w+)(?:\(\d+\))? node with name "
    r"'(.*?)'"
)
_WRONG_DTYPE = re.compile(
    r"Type 'tensor\((\w+)\)' of input parameter \((.*?)\) of operator \((\w+)\) in node \((.*?)\)"
)
_ERROR_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")


class Session:
    """A loaded ONNX model on one execution provider.

    `run` may be called from several threads at once. The session is a context manager; closing
    it frees the weights, while tensors it returned stay valid. `device_id` is that of the GPU.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        provider: str,
        device_id: int = 0,
        *,
        flush_denormals: bool = True,
    ) -> None:
        self._session: onnxruntime.InferenceSession | None = session
        self._flush = flush_denormals
        self._replay: Replay | None = None
        self.provider = provider
        self.device_id = device_id
        self._inputs = tuple(Argument.of(argument) for argument in session.get_inputs())
        outputs = session.get_outputs()
        self.output_names: tuple[str, ...] = tuple(argument.name for argument in outputs)
        self._outputs = tuple(Argument.of(argument) for argument in outputs)
        self._output_dtypes = tuple(output.dtype for output in self._outputs)

    def __reduce__(self) -> NoReturn:
        """Raises UsageError: what onnxruntime holds is neither copied nor pickled."""
        raise UsageError(
            "A session can't be copied or pickled: open the file again, or copy the Optimized, "
            "which opens its own."
        )

    @classmethod
    def open(
        cls,
        model: bytes | Path,
        target: Target,
        *,
        threads: int | None = None,
        spinning: bool = True,
        graph_optimization: GraphOptimization = "all",
        tf32: bool = False,
        cuda_graph: bool = False,
        flush_denormals: bool = True,
        provider_options: Mapping[str, Any] | None = None,
    ) -> Session:
        """Load a model. A model with external data must be given as a path.

        `threads` is the number of intra-op threads, by default as many as torch uses; without
        `spinning` they sleep at once when there is nothing to do, which leaves the cores to others
        and wakes more slowly. `tf32` lets CUDA round fp32 matrix products to 10 mantissa bits,
        which is outside the fp32 error budget. `cuda_graph` records the kernels of a model of
        static shapes once and replays them, one run at a time. `flush_denormals` counts floats
        below the least normal one as zero on the CPU, where each would take a hundred cycles and
        masked attention makes many; not in a file that says that it counts on them.
        `provider_options` are onnxruntime's own.

        Raises LoadError for a file that is missing or not a model onnxruntime accepts, UsageError
        for options that there aren't, and ProviderError when the provider can't be used, which
        onnxruntime itself only logs.
        """
        if isinstance(model, Path):
            require_file(model)
        options = session_options(
            threads,
            spinning=spinning,
            graph_optimization=graph_optimization,
            flush_denormals=flush_denormals,
        )
        extra = checked_options(target, provider_options, tf32=tf32, cuda_graph=cuda_graph)
        if target.provider == "cpu":
            session = _create(model, options, target, extra)
            require_exact(session.get_modelmeta().custom_metadata_map)
            if flush_denormals and kept_by(session.get_modelmeta().custom_metadata_map):
                flush_denormals = False  # an option of the session that depends on the file
                kept = session_options(
                    threads,
                    spinning=spinning,
                    graph_optimization=graph_optimization,
                    flush_denormals=False,
                )
                session = _create(model, kept, target, extra)
            return cls(session, target.execution_provider, flush_denormals=flush_denormals)
        if target.execution_provider not in onnxruntime.get_available_providers():
            raise ProviderError(
                f"The target {target} needs {target.execution_provider}, which the installed "
                f"onnxruntime {onnxruntime.__version__} was built without: "
                f"{cuda_install_command()}, or use --target cpu."
            )
        device = graph_device(int(extra["device_id"])) if cuda_graph else None
        failed = preload_cuda()
        with onnxruntime_messages() as logged:
            session = _create(model, options, target, extra)
        used = session.get_providers()[0]
        if used != target.execution_provider:
            raise ProviderError(
                f"The target {target} was asked for and onnxruntime fell back to {used}: "
                f"{'; '.join(failed or logged) or 'it gave no reason'}. "
                f"Try {cuda_install_command()}, or use --target cpu."
            )
        opened = cls(session, used, int(extra["device_id"]), flush_denormals=flush_denormals)
        if device is not None:
            opened._replay_on(device)
        return opened

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(wanted.name for wanted in self._inputs)

    def run(
        self, feeds: Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Run the model on tensors in input order, or by name; returns its outputs in order.

        Outputs are new tensors, on the CPU, or on the GPU when a CUDA session was given a tensor
        that is there. Contiguous tensors are not copied on the way in, nor are outputs.

        Raises UsageError when the number, names, dtypes or shapes of the tensors don't fit the
        model, and ProviderError when onnxruntime fails while running it.
        """
        session = self._open_session()
        tensors = in_order(feeds, self.input_names)
        check_inputs(self._inputs, tensors)
        self._require_here(tensors)
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        try:
            if self._replay is not None:
                return tuple(self._replay.run(tensors))
            if self.provider == "CPUExecutionProvider":
                values = {n: to_ort(t) for n, t in zip(self.input_names, tensors, strict=True)}
                with denormals(flush=self._flush):
                    results = session.run_with_ort_values(list(self.output_names), values)
            else:
                results = self._run_bound(session, tensors)
        except Exception as error:
            raise self._failed(error) from error
        outputs = []
        for name, value, dtype in zip(self.output_names, results, self._output_dtypes, strict=True):
            output = to_torch(value, dtype)
            # onnxruntime hands an input that is also an output back as the same memory.
            outputs.append(output.clone() if name in self.input_names else output)
        return tuple(outputs)

    def step(
        self,
        feeds: Mapping[str, torch.Tensor],
        kept: Mapping[str, OrtValue],
        fetched: Sequence[str],
        keep: Sequence[str],
    ) -> tuple[tuple[torch.Tensor, ...], tuple[OrtValue, ...]]:
        """One run of a model with a state: the outputs `fetched` as tensors, `keep` as they are.

        What is kept stays where the provider computes, and is given to the next step in `kept`
        without a copy. Fetched tensors are on the CPU. Raises as `run` does.
        """
        session = self._open_session()
        try:
            values = {name: to_ort(tensor.contiguous()) for name, tensor in feeds.items()}
            values.update(kept)
            if self.provider == "CPUExecutionProvider":
                with denormals(flush=self._flush):
                    results = session.run_with_ort_values([*fetched, *keep], values)
            else:
                binding = session.io_binding()
                for name, value in values.items():
                    binding.bind_ortvalue_input(name, value)
                for name in fetched:
                    binding.bind_output(name, "cpu")
                for name in keep:
                    binding.bind_output(name, "cuda", self.device_id)
                session.run_with_iobinding(binding)
                binding.synchronize_outputs()
                results = list(binding.get_outputs())
        except Exception as error:
            raise self._failed(error) from error
        dtypes = dict(zip(self.output_names, self._output_dtypes, strict=True))
        tensors = tuple(
            to_torch(value, dtypes[name]) for name, value in zip(fetched, results, strict=False)
        )
        return tensors, tuple(results[len(fetched) :])

    def binding(self) -> onnxruntime.IOBinding:
        """A binding for `run_binding`; the caller keeps to the names and dtypes of the model."""
        return self._open_session().io_binding()

    def run_binding(self, binding: onnxruntime.IOBinding) -> list[OrtValue]:
        """One run; its outputs in the order in which they were bound. Raises as `run` does."""
        session = self._open_session()
        try:
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
        except Exception as error:
            raise self._failed(error) from error
        return list(binding.get_outputs())

    def _failed(self, error: Exception) -> AttngraphError:
        if guarded := _GUARDED.search(str(error)):
            return UsageError(
                f"The inputs have sizes that the model was not compiled for: they must have "
                f"{guarded[1]}."
            )
        return ProviderError(
            f"onnxruntime failed while running the model on {self.provider}: {_reason(error)}."
        )

    def _open_session(self) -> onnxruntime.InferenceSession:
        if self._session is None:
            raise UsageError("This session is closed: open it again to run the model.")
        return self._session

    def empty(self, name: str, sizes: Mapping[str, int]) -> OrtValue:
        """Zeros for an input at these sizes of its named dims, 0 for those without one."""
        declared = self.input_shape(name)
        shape = [dim if isinstance(dim, int) else sizes.get(dim or "", 0) for dim in declared]
        return to_ort(torch.zeros(shape, dtype=self.input_dtype(name)))

    def zeros(self, name: str, sizes: Mapping[str, int]) -> torch.Tensor:
        """Zeros for an input at these sizes of its named dims, where the provider computes.

        Raises UsageError where that is a GPU and torch has no CUDA to make them with, and where
        there is no memory for them.
        """
        device = torch.device("cpu")
        if self.provider != "CPUExecutionProvider":
            if not torch.cuda.is_available():
                raise UsageError(
                    "A static cache on a GPU needs a PyTorch with CUDA, which makes the buffers: "
                    "install one, or compile with a growing cache."
                )
            device = torch.device("cuda", self.device_id)
        shape = [sizes[dim] if isinstance(dim, str) else dim or 0 for dim in self.input_shape(name)]
        dtype = self.input_dtype(name)
        try:
            made = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise UsageError(
                f"There is no memory for {name}, a static cache of {tuple(shape)} "
                f"({math.prod(shape) * dtype.itemsize / 2**30:,.1f} GiB): compile with a smaller "
                "max_length, or with a growing cache."
            ) from error
        if made.is_cuda:  # onnxruntime runs on a stream of its own
            torch.cuda.current_stream(device).synchronize()
        return made

    def _input(self, name: str) -> Argument:
        return self._inputs[self.input_names.index(name)]

    def output_dtype(self, name: str) -> torch.dtype:
        return self._output_dtypes[self.output_names.index(name)]

    def input_dtype(self, name: str) -> torch.dtype:
        return self._input(name).dtype

    def input_shape(self, name: str) -> tuple[int | str | None, ...]:
        """Sizes and names of an input's dims."""
        return self._input(name).shape or ()

    def output_shape(self, name: str) -> tuple[int | str | None, ...]:
        """Sizes and names of an output's dims."""
        return self._outputs[self.output_names.index(name)].shape or ()

    @property
    def placement(self) -> Mapping[str, Mapping[str, int]]:
        """How many nodes of each op run on each provider. Raises UsageError once closed."""
        if self._session is None:
            raise UsageError("This session is closed: open it again to see where its nodes run.")
        placed: dict[str, Counter[str]] = {}
        # One part holds all nodes of the CPU provider, and each node of CUDA's is a part.
        for part in self._session.get_provider_graph_assignment_info():
            ops = placed.setdefault(part.ep_name, Counter())
            ops.update(node.op_type for node in part.get_nodes())
        return {provider: dict(sorted(ops.items())) for provider, ops in placed.items()}

    def _replay_on(self, device: torch.device) -> None:
        """Has runs replay on buffers that lie there."""
        assert self._session is not None
        inputs = [Fixed.of("input", put.name, put.dtype, put.shape) for put in self._inputs]
        outputs = [Fixed.of("output", put.name, put.dtype, put.shape) for put in self._outputs]
        self._replay = Replay(self._session, inputs, outputs, device)

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file says beside the graph. Raises UsageError once the session is closed."""
        if self._session is None:
            raise UsageError("This session is closed: open it again to read its metadata.")
        return dict(self._session.get_modelmeta().custom_metadata_map)

    def _run_bound(
        self, session: onnxruntime.InferenceSession, tensors: Sequence[torch.Tensor]
    ) -> list[onnxruntime.OrtValue]:
        """One run through a binding of its own, so that threads don't share one."""
        on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
        binding = session.io_binding()
        for name, tensor in zip(self.input_names, tensors, strict=True):
            binding.bind_ortvalue_input(name, to_ort(tensor))
        for name in self.output_names:
            if on_gpu:
                binding.bind_output(name, "cuda", on_gpu[0].get_device())
            else:
                binding.bind_output(name, "cpu")
        if on_gpu:  # onnxruntime runs on a stream of its own
            torch.cuda.current_stream(on_gpu[0].device).synchronize()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return list(binding.get_outputs())

    def _require_here(self, tensors: Sequence[torch.Tensor]) -> None:
        for name, tensor in zip(self.input_names, tensors, strict=True):
            if tensor.is_cuda and self.provider == "CPUExecutionProvider":
                raise UsageError(
                    f"Input {name!r} is on {tensor.device} and the session on the CPU: "
                    "pass it as .cpu(), or open the session for cuda."
                )

    def close(self) -> None:
        """Free the weights. Runs in progress in other threads finish first."""
        self._session = self._replay = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def elsewhere(session: Session) -> list[str]:
    """A sentence about the nodes that are not on the session's provider, where there are any.

    onnxruntime computes sizes on the CPU on purpose, and puts what a GPU has no kernel for there.
    """
    placed = session.placement
    total = sum(sum(ops.values()) for ops in placed.values())
    return [
        f"On {session.provider}, {sum(ops.values())} of {total} nodes run on {provider}: "
        f"{', '.join(f'{count} {op}' for op, count in ops.items())}."
        for provider, ops in placed.items()
        if provider != session.provider
    ]


def _create(
    model: bytes | Path,
    options: onnxruntime.SessionOptions,
    target: Target,
    provider_options: dict[str, str],
) -> onnxruntime.InferenceSession:
    what = f"the ONNX file {str(model)!r}" if isinstance(model, Path) else "the ONNX model"
    try:
        with denormals(flush=flushed()):  # the first session of a process sets it for this thread
            return onnxruntime.InferenceSession(
                model,
                options,
                providers=[(target.execution_provider, provider_options)],
                enable_fallback=0,
            )
    except Exception as error:
        kind: type[AttngraphError] = LoadError
        if type(error).__name__ in ("NotImplemented", "EPFail", "RuntimeError"):
            kind = ProviderError
        raise kind(f"onnxruntime can't open {what} on {target}: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    if found := _NO_KERNEL.search(str(error)):
        op, name = found.groups()
        return f"no provider has a kernel of {op} for the dtypes that the node {name!r} has"
    if found := _WRONG_DTYPE.search(str(error)):
        dtype, value, op, name = found.groups()
        return f"{op}, which the node {name!r} is, takes no {dtype}, which {value!r} is"
    return " ".join(_ERROR_PREFIX.sub("", str(error)).split()).rstrip(".")
