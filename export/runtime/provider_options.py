"""Options of onnxruntime's providers, checked before torch and onnxruntime are imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from attngraph.errors import UsageError
from attngraph.export.target import Target

_Allowed: TypeAlias = Literal["a flag", "a number"] | tuple[str, ...]

# For an option that the provider doesn't know, onnxruntime logs a line and runs on the CPU.
PROVIDER_OPTIONS: Mapping[str, Mapping[str, _Allowed]] = {
    "cpu": {},
    "cuda": {
        "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
        "cudnn_conv1d_pad_to_nc1d": "a flag",
        "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        "cudnn_conv_use_max_workspace": "a flag",
        "device_id": "a number",
        "do_copy_in_default_stream": "a flag",
        "enable_skip_layer_norm_strict_mode": "a flag",
        "fuse_conv_bias": "a flag",
        "gpu_mem_limit": "a number",
        "prefer_nhwc": "a flag",
        "sdpa_kernel": "a number",
        "tunable_op_enable": "a flag",
        "tunable_op_max_tuning_duration_ms": "a number",
        "tunable_op_tuning_enable": "a flag",
        "use_ep_level_unified_stream": "a flag",
    },
}
_OWN = {"enable_cuda_graph": "cuda_graph", "use_tf32": "tf32"}


def provider_options(
    target: Target, given: Mapping[str, Any] | None, *, tf32: bool, cuda_graph: bool
) -> dict[str, str]:
    """The provider's options as onnxruntime takes them.

    Raises UsageError, listing what there is, for an option the provider doesn't have or a value it
    can't take.
    """
    if cuda_graph and target.provider != "cuda":
        raise UsageError(f"cuda_graph is for target cuda, not for {target}.")
    known = PROVIDER_OPTIONS[target.provider]
    result = {}
    if target.provider == "cuda":
        result = {
            "device_id": "0",
            "use_tf32": flag(tf32),
            "enable_cuda_graph": flag(cuda_graph),
            # else a fused residual norm sums its statistics in the dtype of its input
            "enable_skip_layer_norm_strict_mode": "1",
        }
    for name, value in (given or {}).items():
        if target.provider == "cuda" and name in _OWN:
            raise UsageError(f"The provider option {name} is set by {_OWN[name]}=True or False.")
        if name not in known:
            listed = f"it has {', '.join(known)}" if known else "it has none"
            raise UsageError(
                f"{target.execution_provider} has no option {name!r} that can be set: {listed}."
            )
        result[name] = _checked(name, value, known[name])
    return result


def check_settings(target: Target, settings: Mapping[str, Any]) -> None:
    """Raises UsageError for keyword arguments that `Session.open` would refuse. This is called
    before a model is compiled, which takes longer.
    """
    asked = {name: bool(settings.get(name)) for name in _OWN.values()}
    provider_options(target, settings.get("provider_options"), **asked)


def _checked(name: str, value: Any, allowed: _Allowed) -> str:
    text = flag(value) if isinstance(value, bool) else str(value)
    if allowed == "a flag":
        text = {"true": "1", "false": "0"}.get(text.lower(), text)
    if allowed == "a flag":
        fits, what = text in ("0", "1"), "True or False"
    elif allowed == "a number":
        fits, what = not isinstance(value, bool) and text.isdecimal(), "a number, 0 or more"
    else:
        fits, what = text in allowed, f"one of {', '.join(allowed)}"
    if not fits:
        raise UsageError(f"The provider option {name} is {value!r}; it must be {what}.")
    return text


def flag(value: bool) -> str:
    """The value in onnxruntime's notation."""
    return "1" if value else "0"
