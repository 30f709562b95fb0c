"""Load a head with SGLang's own model class on a CPU. Runs in SGLang's environment; see sglang_check.py.

    python sglang_load.py HEAD_DIR RESULT.json

Builds the class that config.json names, float32 and one process; fills every parameter with NaN, loads
model.safetensors through its load_weights, and runs the two steps of check/reference.safetensors through its
forward with plain causal attention. Writes what stayed NaN, what differs from the file by value, the hot
token ids, and the largest difference of the outputs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoProcessor, LlamaConfig  # noqa: F401  (looks for torchvision itself)

MODULES = {"LlamaForCausalLMEagle3": "llama_eagle3", "LlamaForCausalLMEagle": "llama_eagle"}
STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
STACKED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
# Imported beside our models: image models' library, whose wheel brings another torch, and kernels for a GPU.
NOT_NEEDED = ("torchvision", "sgl_kernel")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets modules be imported that are not there; whatever is called in them fails."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Claim the module and all below it."""
        if name.split(".")[0] in NOT_NEEDED:
            return importlib.machinery.ModuleSpec(name, self, is_package=name != "sgl_kernel")
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        """Return a module that has every name."""
        module = types.ModuleType(spec.name)
        module.__getattr__ = _nothing  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing."""


def _nothing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return SimpleNamespace(__name__=name)


def build(folder: Path) -> torch.nn.Module:
    """Return the engine's module for a head directory, every parameter NaN."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.runtime_context import get_context, get_parallel

    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = values["architectures"][0]
    get_context().override_server_args(device="cpu", dtype="float32").install()
    ranks = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank", "moe_ep_rank")
    get_parallel().override_permanently(**dict.fromkeys(ranks, 0))
    init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
    initialize_model_parallel()
    module = importlib.import_module(f"sglang.srt.models.{MODULES[name]}")
    model = getattr(module, name)(LlamaConfig.from_dict(values))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    return model


def compare(model: torch.nn.Module, stored: dict[str, torch.Tensor]) -> list[str]:
    """Return which parameters are not, value by value, what the file holds."""
    wanted: dict[str, list[torch.Tensor]] = {}
    for name, tensor in sorted(stored.items(), key=_order):
        parts = name.replace("midlayer.", "layers.0.").split(".")
        if name in ("d2t", "t2d"):
            continue
        place = ".".join(STACKED.get(part, part) for part in parts)
        wanted.setdefault(place if place.startswith("lm_head") else f"model.{place}", []).append(tensor)
    faults, found = [], dict(model.named_parameters())
    for name, tensors in wanted.items():
        whole = torch.cat(tensors)
        if name not in found:
            faults.append(f"{name} has no place")
        elif not torch.equal(found[name][: len(whole)], whole):  # a vocabulary may be padded
            faults.append(f"{name} differs")
    targets = {"model.embed_tokens.weight"} | (
        {"lm_head.weight"} if "lm_head.weight" not in stored else set()
    )
    faults += [f"{name} stays unset" for name in found if name not in wanted and name not in targets]
    return faults


def _order(item: tuple[str, torch.Tensor]) -> int:
    """Sort q, k, v, and gate before up, as they are stacked."""
    return next((at for at, part in enumerate(STACKED) if part in item[0]), 0)


class Attention:
    """The engine's interface of attention: causal over the rows themselves."""

    def forward(self, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **more: Any) -> torch.Tensor:
        """Return the attended values [rows, heads * hd]."""
        heads, hd = layer.tp_q_head_num, layer.head_dim
        q, k, v = (x.view(len(x), -1, hd) for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scaling
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)


@torch.no_grad()
def run(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the outputs of both steps: logits of an EAGLE-3 head, states of an EAGLE-1 head."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    hidden, outs = inputs["features"], []
    with forward_context(ForwardContext(attn_backend=Attention())):
        for step in range(2):
            batch = SimpleNamespace(
                spec_info=SimpleNamespace(hidden_states=hidden),
                forward_mode=ForwardMode.DECODE,
                residual_stream=None,
            )
            positions = inputs["positions"] + step
            out = model.model(None, positions, batch, input_embeds=inputs["embeds"][step])
            out, hidden = (out[0], out[1][0]) if isinstance(out, tuple) else (out, out)
            outs.append(out)
    states = torch.stack(outs)
    return states @ model.lm_head.weight.T if "logits" in inputs else states


def main() -> None:
    """Load, compare, run, write."""
    folder, result = map(Path, sys.argv[1:])
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    sys.meta_path.insert(0, Absent())
    model = build(folder)
    stored = load_file(folder / "model.safetensors")
    model.load_weights(iter(stored.items()))  # type: ignore[operator]
    inputs = load_file(folder / "check" / "reference.safetensors")
    meant = inputs["logits" if "logits" in inputs else "states"]
    found = run(model, inputs)[..., : meant.shape[-1]]
    hot = getattr(model, "hot_token_id", None)
    value = {
        "class": type(model).__name__,
        "parameters": sum(1 for _ in model.parameters()),
        "faults": compare(model, stored),
        "hot_token_ids": None if hot is None else hot.tolist(),
        "largest_difference": float((found - meant).abs().max()),
        "largest_output": float(meant.abs().max()),
        "tokens_that_differ": int((found.argmax(-1) != meant.argmax(-1)).sum()),
    }
    result.write_text(json.dumps(value), encoding="utf-8")


if __name__ == "__main__":
    main()
