"""Tensors of heads made elsewhere, brought to the names that heads have here.

The layouts: EAGLE's own repository, SpecForge and SGLang (``midlayer.*``), speculators and ModelOpt
(``layers.0.*``), each with or without copies of the target's embedding and lm_head.
"""

from __future__ import annotations

import re
import reprlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.heads.disk import WEIGHTS
from eagle_train.io.tensors import load_tensors
from eagle_train.io.text import read_json

PICKLED, INDEX = "pytorch_model.bin", "model.safetensors.index.json"
_DROPPED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
_RENAMED = {
    "fusion_fc.": "fc.",  # speculators, EAGLE-1
    "transformer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",  # before fc_norm had its name
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_NOT_COMPUTED = {
    "kv_a_proj": "latent attention",
    "kv_b_proj": "latent attention",
    "experts": "a mixture of experts",
    "parallel_draft_heads": "parallel drafting",
    "mask_hidden": "parallel drafting",
    "weight_scale": "quantised weights",
    "input_scale": "quantised weights",
    "embedding_layernorm": "a norm on the embedding",
    "pre_lm_head_layernorm": "a norm before lm_head",
    "eh_proj": "a head of the MTP kind",
    "lora_": "low-rank adapters",
}


@dataclass
class ForeignTensors:
    """Weights under the names that heads have here, and what came beside them."""

    kind: str
    weights: dict[str, Tensor]
    maps: dict[str, Tensor]  # d2t, t2d
    embedding: Tensor | None  # [V, H], a copy of the target's, or not
    lm_head: Tensor | None  # [V, H], an EAGLE-1 head's copy of the target's, or not
    numbered_first: bool  # the first layer is called layers.0

    @property
    def num_layers(self) -> int:
        """How many decoder layers there are."""
        numbers = {name.split(".")[1] for name in self.weights if name.startswith("layers.")}
        return len(numbers) + any(name.startswith("midlayer.") for name in self.weights)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a head directory, of ``pytorch_model.bin`` where there are no safetensors.

    A pickle is opened weights-only: one that holds anything but tensors is refused, and nothing in it runs.
    Raises UserError naming what is missing or damaged.
    """
    if (folder / INDEX).is_file():
        names = _files_of(folder / INDEX)
        return {key: tensor for name in names for key, tensor in load_tensors(folder / name)[0].items()}
    if (folder / WEIGHTS).is_file():
        return load_tensors(folder / WEIGHTS)[0]
    file = folder / PICKLED
    if not file.is_file():
        raise UserError(f"{folder}: holds neither {WEIGHTS} nor {PICKLED}; wanted a draft head")
    _check_zip(file)
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises whatever the bytes lead to
        raise UserError(
            f"{file}: cannot be read weights-only: it is damaged, or holds more than tensors, which could "
            "run code; fetch it again, or ask its makers for model.safetensors"
        ) from error
    return _plain_tensors(loaded, file)


def _check_zip(file: Path) -> None:
    """Raise UserError where a part of a zipped pickle is not what its checksum says: torch does not ask."""
    if not zipfile.is_zipfile(file):
        return
    try:
        with zipfile.ZipFile(file) as parts:
            unchecked = not any(part.CRC for part in parts.infolist())  # torch can be told to leave them out
            damaged = None if unchecked else parts.testzip()
    except Exception as error:  # unpacking raises whatever the bytes lead to
        raise UserError(f"{file}: damaged, its parts cannot be checked; fetch it again") from error
    if damaged is not None:
        raise UserError(
            f"{file}: damaged: part {reprlib.repr(damaged)} differs from its checksum; fetch it again"
        )


def _files_of(index: Path) -> list[str]:
    """Return the names of the files that an index speaks of, all of them in its own folder."""
    table = read_json(index, "fetch it again").get("weight_map")
    if not isinstance(table, dict) or not table:
        raise UserError(
            f"{index}: weight_map is {reprlib.repr(table)}, wanted an object that names each tensor's file; "
            "fetch it again"
        )
    for tensor, name in table.items():
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or "\0" in name:
            raise UserError(
                f"{index}: the file of {reprlib.repr(tensor)} is {reprlib.repr(name)}, wanted a file's name; "
                "fetch it again"
            )
    return sorted(set(table.values()))


def _plain_tensors(loaded: Any, file: Path) -> dict[str, Tensor]:
    """Return what a pickle held where it is a state_dict of tensors with their data beside them."""
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise UserError(f"{file}: holds no table of tensors; wanted a head's state_dict")
    for name, value in loaded.items():
        if not isinstance(name, str):
            raise UserError(f"{file}: calls a tensor {reprlib.repr(name)}, wanted a head's state_dict")
        if value.is_meta or value.layout != torch.strided or value.is_quantized or value.is_nested:
            what = "without data" if value.is_meta else "sparse, nested or quantised"
            raise UserError(f"{file}: {name} is {what}, wanted a plain tensor; save the head again")
        held = value.untyped_storage().nbytes() // value.element_size()
        if held < value.numel():
            raise UserError(
                f"{file}: {reprlib.repr(name)} is {list(value.shape)}, but the file holds only {held} of "
                f"these {value.numel()} numbers; save the head again, its tensors contiguous"
            )
    return dict(loaded)


def to_our_names(stored: dict[str, Tensor], where: str) -> ForeignTensors:
    """Return `stored` under our names. Raises UserError naming tensors of a kind not computed here."""
    for name, value in stored.items():
        if value.ndim == 0:
            raise UserError(f"{where}: {name} is a single number, wanted a vector or a matrix")
        for part, what in _NOT_COMPUTED.items():
            if part in name:
                raise UserError(f"{where}: {name} belongs to {what}, which eagle does not compute")
    weights = {_renamed(name): value for name, value in stored.items() if not name.endswith(_DROPPED)}
    maps: dict[str, Tensor] = {name: weights.pop(name) for name in ("d2t", "t2d") if name in weights}
    embedding = weights.pop("embed_tokens.weight", None)
    numbered_first = not any(name.startswith("midlayer.") for name in weights)
    if any(name.startswith("lm_heads.") for name in weights):
        return ForeignTensors("medusa", _one_layer_each(weights, where), maps, embedding, None, False)
    if any(name.endswith(".hidden_norm.weight") for name in weights):
        kind = "eagle3"
        weights = {_layer_of_eagle3(name, numbered_first): value for name, value in weights.items()}
    elif "fc.weight" in weights and any(name.startswith("layers.0.") for name in weights):
        kind = "eagle1"
    elif "fc.weight" not in weights and any(name.startswith("model.embed_tokens.") for name in stored):
        raise UserError(f"{where}: a whole model, wanted a draft head; the model itself goes to --target")
    else:
        raise UserError(
            f"{where}: no draft head that eagle knows: wanted fc.weight with a decoder layer (layers.0.* or "
            f"midlayer.*), found {', '.join(list(stored)[:4]) or 'nothing'}"
        )
    lm_head = None
    if kind == "eagle1":
        lm_head = weights.pop("lm_head.weight", None)
    else:
        _complete_norms(weights)
    _complete_biases(weights)
    return ForeignTensors(kind, weights, maps, embedding, lm_head, numbered_first)


def common_dtype(weights: dict[str, Tensor], where: str) -> torch.dtype:
    """Return the narrowest float dtype that holds every weight. Raises UserError for other dtypes."""
    for name, value in weights.items():
        if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(f"{where}: {name} is {value.dtype}, wanted float32, bfloat16 or float16")
    dtype = next(iter(weights.values())).dtype
    for value in weights.values():
        dtype = torch.promote_types(dtype, value.dtype)
    return dtype


def _renamed(name: str) -> str:
    name = name.removeprefix("medusa_heads.")
    if found := re.fullmatch(
        r"([0-9]+)\.([0-9]+)\.(linear\.)?(weight|bias)", name
    ):  # Medusa's own repository
        head, layer, linear, what = found.groups()
        return f"blocks.{head}.layers.{layer}.{what}" if linear else f"lm_heads.{head}.{what}"
    for old, new in _RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _layer_of_eagle3(name: str, numbered_first: bool) -> str:
    """Call the first layer midlayer; those above it keep their numbers."""
    return re.sub(r"^layers\.0\.", "midlayer.", name) if numbered_first else name


def _one_layer_each(weights: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return Medusa's weights with blocks of one layer, whose bias is zeros where there is none."""
    found = {}
    for name, value in weights.items():
        block = re.fullmatch(r"(blocks\.\d+)\.layers\.(\d+)\.(weight|bias)", name)
        if block and block[2] != "0":
            raise UserError(f"{where}: {name}: Medusa blocks of several layers, eagle computes one")
        found[f"{block[1]}.{block[3]}" if block else name] = value
        if block and block[3] == "weight":
            found.setdefault(f"{block[1]}.bias", value.new_zeros(len(value)))
    return found


def _complete_norms(weights: dict[str, Tensor]) -> None:
    """Give the input norm of EAGLE-3's layers above the first both of its names; see `disk.norm_twins`."""
    for name in list(weights):
        if found := re.fullmatch(r"(layers\.[0-9]+)\.(input_layernorm|hidden_norm)\.weight", name):
            other = "hidden_norm" if found[2] == "input_layernorm" else "input_layernorm"
            weights.setdefault(f"{found[1]}.{other}.weight", weights[name])


def _complete_biases(weights: dict[str, Tensor]) -> None:
    """Give every attention that has some of its four biases the others, as zeros."""
    layers = {
        name.split(".self_attn.")[0] for name in weights if re.search(r"self_attn\.\w_proj\.bias", name)
    }
    for layer in layers:
        for part in ("q", "k", "v", "o"):
            weight = weights.get(f"{layer}.self_attn.{part}_proj.weight")
            if weight is not None:
                weights.setdefault(f"{layer}.self_attn.{part}_proj.bias", weight.new_zeros(len(weight)))
