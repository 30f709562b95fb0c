"""What was written is read back and must be the trained head: by name, by shape, by logits.

The reference run is a causal text of a few rows with random features, then one more step on the carried
outputs, so that every tensor, the RoPE settings and the switches all bear on the figures compared.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.export.layout import engine_config, tensor_faults
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import CONFIG, WEIGHTS, Head, load_head
from eagle_train.heads.foreign import is_foreign, read_foreign
from eagle_train.heads.medusa import MedusaHead
from eagle_train.heads.rope_settings import rope_of
from eagle_train.io.paths import make_folder
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.io.text import read_json

REFERENCE_FOLDER, REFERENCE = "check", "reference.safetensors"
_OUTPUTS = {"eagle1": "states", "eagle3": "logits", "medusa": "logits"}

_MEANING = (
    "features: captured target layers side by side, low to high, one row per token, read at step 0; embeds: "
    "[step, row, hidden], embedding of the token after each row; positions: RoPE position of each row at "
    "step 0, one more at step 1; {outputs}: of steps 0 and 1, in float32 from the weights as stored; rows "
    "attend causally to the rows of their own step; step 1 reads at each row what step 0 put out there"
)
_MEDUSA = (
    "features: the target's last states; logits: of every head on them, in float32 from weights as stored"
)
_ROWS = 8
_FARTHEST = 4096  # positions up to here; the cosine table grows with the largest
_ROUNDINGS = 16  # allowed relative change of the logits, in units of the dtype's spacing at 1


def verify(folder: Path, trained: Head, config: HeadConfig, engine: str, dtype: torch.dtype) -> float:
    """Read the export in `folder` back; return the relative change of the logits against `trained`.

    0.0 means equal to the bit. `config` is what was meant to be written, `trained` the head in its own
    dtype, in the form that the engine wants. Raises UserError naming every difference.
    """
    stored, _ = load_tensors(folder / WEIGHTS)
    faults = tensor_faults(stored, config, engine, dtype)
    faults += _config_faults(folder / CONFIG, config, engine)
    if faults:
        raise UserError(f"{folder / WEIGHTS}: not what {engine} loads: {'; '.join(faults)}")
    read = read_foreign(folder).head if is_foreign(folder) else load_head(folder)
    got, wanted = reference_outputs(read), reference_outputs(trained)
    rounded = wanted
    if next(trained.parameters()).dtype != dtype:
        rounded = reference_outputs(copy.deepcopy(trained).to(dtype))
    if not torch.equal(got, rounded):
        raise UserError(f"{folder}: the head read back computes other logits than the one trained")
    change = float((got - wanted).norm() / wanted.norm().clamp_min(torch.finfo(torch.float32).tiny))
    limit = _ROUNDINGS * torch.finfo(dtype).eps
    if not change <= limit:
        name = str(dtype).removeprefix("torch.")
        raise UserError(
            f"{folder}: rounding to {name} changes the logits by {change:.1%}, wanted at most {limit:.1%}; "
            "export with --dtype keep, or bf16"
        )
    return change


def write_reference(folder: Path, head: Head) -> None:
    """Write inputs and what `head` makes of them, so that anyone can check a loader of the export.

    Not beside the weights: engines load every safetensors file there as weights.
    """
    inputs, name = reference_inputs(head.config), _OUTPUTS[head.config.kind]
    meaning = _MEDUSA if head.config.kind == "medusa" else _MEANING.format(outputs=name)
    tensors = inputs | {name: run_reference(head, inputs)}
    save_tensors(make_folder(folder / REFERENCE_FOLDER) / REFERENCE, tensors, {"meaning": meaning})


def reference_inputs(config: HeadConfig) -> dict[str, Tensor]:
    """Return fixed random inputs of a causal text of a few rows: features, embeds of two steps, positions."""
    generator = torch.Generator().manual_seed(0)
    if config.kind == "medusa":
        return {"features": torch.randn(_ROWS, config.hidden_size, generator=generator)}
    last = min(config.max_position_embeddings, _FARTHEST) - 2
    return {
        "features": torch.randn(_ROWS, config.feature_width, generator=generator),
        "embeds": torch.randn(2, _ROWS, config.hidden_size, generator=generator),
        "positions": torch.linspace(0, max(last, 0), _ROWS).long(),
    }


def reference_outputs(head: Head) -> Tensor:
    """Run `head` in float32 on the reference inputs; see `run_reference`."""
    return run_reference(head, reference_inputs(head.config))


@torch.no_grad()
def run_reference(head: Head, inputs: Mapping[str, Tensor]) -> Tensor:
    """Run two steps in float32: [2, rows, D] logits, or [2, rows, H] for EAGLE-1.

    An EAGLE-1 head has no logits of its own: the target's lm_head reads what is returned here. Medusa heads
    run once, all on the same states: [heads, rows, D].
    """
    if next(head.parameters()).dtype != torch.float32:
        head = copy.deepcopy(head).float()
    if isinstance(head, MedusaHead):
        states, heads = inputs["features"], range(head.config.medusa_heads)
        return torch.stack([head.lm_heads[i](head(states, i)) for i in heads])
    embeds, positions = inputs["embeds"], inputs["positions"]
    attend = partial(_attend, head.config.sliding_window)
    out = head(head.start(inputs["features"]), embeds[0], positions, attend)  # (rows, F) -> (rows, H)
    again = head(head.carry(out), embeds[1], positions + 1, attend)
    outs = torch.stack([out, again])  # (2, rows, H)
    if head.config.kind == "eagle1":
        return outs
    return head.lm_head(head.final(outs))  # type: ignore[operator, union-attr]


def _attend(window: int | None, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over the rows themselves, [rows, heads, hd], `window` of them where given."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def _config_faults(path: Path, config: HeadConfig, engine: str) -> list[str]:
    """Compare config.json with what was meant, also as transformers reads it: engines go through that."""
    from transformers import LlamaConfig

    found, meant = read_json(path, "the export was not written"), engine_config(config, engine)
    faults = [
        f"config.json {key} is {found.get(key, 'absent')!r}, wanted {meant.get(key, 'absent')!r}"
        for key in dict.fromkeys([*meant, *found])
        if (key in found, found.get(key)) != (key in meant, meant.get(key))  # null is not absent
    ]
    if config.kind == "medusa":  # whose config transformers does not know
        return faults
    layer = meant.get("transformer_layer_config", meant)
    read = LlamaConfig.from_dict(found.get("transformer_layer_config", found)).to_dict()
    if rope_of(read) != config.rope_parameters:
        faults.append(f"transformers reads RoPE as {rope_of(read)}, wanted {config.rope_parameters}")
    for key in ("head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "vocab_size"):
        if read.get(key) != layer[key]:
            faults.append(f"transformers reads {key} as {read.get(key)}, wanted {layer[key]}")
    return faults
