"""Modules that only hold another one, and why some models can't be traced as they are.

DataParallel and the like change how a model is trained, not what it computes: the model inside is
compiled, so that inputs, weights and lines have their own names.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

_HOLDERS = {
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": (
        "_checkpoint_wrapped_module"
    ),
}
"""Classes by name: importing them takes seconds, which a model that is none of them saves."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside of DataParallel, DistributedDataParallel, torch.compile and the like."""
    while isinstance(module, nn.Module) and (inner := _HOLDERS.get(_name(type(module)))):
        module = getattr(module, inner)
    return module


def adapters(module: object) -> str:
    """A sentence on a model of peft, which generates by what is inside of it; else empty."""
    merges = callable(getattr(module, "merge_and_unload", None))
    told = " It holds the adapters of peft: compile what its merge_and_unload() returns."
    return told if merges else ""


def hindrance(module: nn.Module) -> str:
    """What keeps a model from being traced, and the line that helps; empty where nothing does."""
    return next(_hindrances(module), "")


def _hindrances(module: nn.Module) -> Iterator[str]:
    for name, part in module.named_modules():
        kind, shown = _name(type(part)), f"{name or 'The model'} is a {type(part).__name__}"
        if "torch.distributed.fsdp" in kind and kind.endswith("FullyShardedDataParallel"):
            yield (
                f"{shown}, whose weights are sharded: build the model without it, and load its "
                "full state dict (FullyShardedDataParallel.state_dict_type(…, FULL_STATE_DICT))."
            )
        if kind.startswith(("torch.ao.nn.quantized", "torch.ao.nn.sparse")):
            yield (
                f"{shown}, whose packed weights torch.export can't read: compile the model as it "
                'was before quantize_dynamic or convert, with weights="int8".'
            )
        if name and isinstance(part, torch.jit.ScriptModule):
            yield (
                f"{name} is a scripted module inside of one that isn't: give the module that it "
                "was made of in its place, or script the whole model (torch.jit.script)."
            )
        if hasattr(part, "_hf_hook"):
            yield (
                f"{shown} that accelerate moves weights for: call "
                "accelerate.hooks.remove_hook_from_module(model, recurse=True) first."
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            yield (
                f"{name} has no shape yet, as in a lazy module: call the model once on the sample "
                "before."
            )
        elif "DTensor" in _name(type(parameter)):
            yield (
                f"{name} is sharded (a DTensor): build the model without fully_shard, and load "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True))."
            )
        elif parameter.is_meta:
            yield f"{name} is on the meta device and has no numbers: load the weights first."
        elif parameter.is_inference():
            yield (
                f"{name} was made under torch.inference_mode(), and can't be traced: build the "
                "model outside of it."
            )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
