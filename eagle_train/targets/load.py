"""Loading the frozen target: a hub id, a directory or a .gguf file, in the dtype it will be served in."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eagle_train import distributed
from eagle_train.errors import UserError, nearest
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.targets import checkpoint
from eagle_train.targets.fingerprint import weights_fingerprint
from eagle_train.targets.generation import checked_eos, own_settings
from eagle_train.targets.lengths import check_length, longest_text
from eagle_train.targets.output_map import OutputMap, output_map
from eagle_train.targets.packed import dense_output

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LONG_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass
class Target:
    """The frozen target model, its text config, and the few things that differ between families."""

    name: str  # as the user gave it
    revision: str | None  # commit of a hub repository
    model: PreTrainedModel
    trust_remote_code: bool = False

    @cached_property
    def config(self) -> PretrainedConfig:
        """The text config."""
        return self.model.config.get_text_config()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer, loaded when first asked for."""
        from eagle_train.data.tokenizer import load_tokenizer

        return load_tokenizer(self.name, trust_remote_code=self.trust_remote_code)

    @cached_property
    def body(self) -> nn.Module:
        """The decoder without its lm_head."""
        decoder = self.model.get_decoder()
        return getattr(self.model, "model", decoder) if decoder is self.model else decoder

    @cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        for module in self.body.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers:
                return module
        raise UserError(
            f"{self.name}: found no list of {self.num_layers} decoder layers in {type(self.body).__name__}; "
            "eagle needs a decoder-only language model"
        )

    @property
    def num_layers(self) -> int:
        """n."""
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """V, the number of logits (padding rows of the lm_head included)."""
        return int(self.lm_head.weight.shape[0])

    @cached_property
    def lm_head(self) -> Any:
        """The output embedding module."""
        head: Any = self.model.get_output_embeddings()
        if head is None:
            raise UserError(f"{self.name}: {type(self.model).__name__} has no lm_head; wanted a causal model")
        if not hasattr(head, "weight"):
            raise UserError(
                f"{self.name}: its lm_head is packed ({type(head).__name__}, without a weight); use a "
                "checkpoint whose lm_head is left as it is, as quantisers do unless told otherwise"
            )
        return head

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.embedding.device

    @cached_property
    def embedding(self) -> Tensor:
        """The input embedding's weight, [V, H]."""
        return checkpoint.weight_of(self.model.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.model.dtype

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """All token ids that end an answer: generation config first, then the config, without doubles.

        Raises UserError where one is no id.
        """
        found: list[int] = []
        generation = getattr(self.model, "generation_config", None)
        for source in (generation, self.config):
            found += checked_eos(getattr(source, "eos_token_id", None), self.name)
        return tuple(dict.fromkeys(found))

    @property
    def own_settings(self) -> dict[str, Any]:
        """What its generation_config does to logits beside temperature, top-k and top-p; mostly nothing."""
        return own_settings(getattr(self.model, "generation_config", None))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the weights, the same in fp32, bf16 and across checkpoint layouts."""
        return weights_fingerprint(self.model, self.config, self.whole)

    @cached_property
    def output_map(self) -> OutputMap:
        """What the family does to the lm_head's output."""
        return output_map(self.config)

    @cached_property
    def _cache_argument(self) -> str:
        """transformers renamed ``past_key_values`` to ``cache``: the one place that knows."""
        names = inspect.signature(self.body.forward).parameters
        return "cache" if "cache" in names else "past_key_values"

    def run_body(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Run the decoder on int64 [B, T] and return the final states after the norm, [B, T, H].

        `cache` (a transformers Cache) is extended in place. No lm_head is run.
        """
        if longest_text(self.config) is not None:
            past = 0 if cache is None else int(cache.get_seq_length())
            length = past + input_ids.shape[1] if position_ids is None else int(position_ids.max()) + 1
            check_length(self.config, length, self.name)
        given = {"position_ids": position_ids, "attention_mask": attention_mask, self._cache_argument: cache}
        arguments = {name: value for name, value in given.items() if value is not None}
        output = self.body(input_ids=input_ids, use_cache=cache is not None, return_dict=True, **arguments)
        return output.last_hidden_state

    def logits(self, last: Tensor) -> Tensor:
        """Return the model's own logits [..., V] of final states [..., H], in the model's dtype."""
        place = self.lm_head.weight.device  # meta where accelerate fetches the weight and moves the input
        return self.output_map(self.lm_head(last if place.type == "meta" else last.to(place)))

    def run_model(self, input_ids: Tensor, **arguments: Any) -> Any:
        """Run the model, lm_head and all, on int64 [B, T]; return its output, whose parts transformers names.

        `arguments` are those of its forward. No cache is kept.
        """
        return self.model(input_ids=input_ids, use_cache=False, **arguments)

    def whole(self, name: str, weight: Tensor) -> Tensor:
        """Return the model's tensor `name` in full, of which this process holds `weight`."""
        return weight

    def output_weights(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return embedding [V, H], lm_head [V, H] and its bias [V], as they are stored."""
        return self.embedding, checkpoint.weight_of(self.lm_head), getattr(self.lm_head, "bias", None)

    def frozen(self) -> FrozenTarget:
        """Return embedding and output map, sharing memory with the model."""
        rows, head, bias = self.output_weights()
        embedding = dense_output(rows, self.name, "embedding")
        weight = dense_output(head, self.name, "lm_head")
        return FrozenTarget(
            embedding=embedding,
            lm_head=weight.to(embedding.device),
            bias=None if bias is None else bias.detach().to(embedding.device),
            logit_scale=self.output_map.multiply / self.output_map.divide,
            softcap=self.output_map.softcap,
            config=checkpoint.plain_config(self.config),
            target=self.identity(),
            generation={**self.own_settings, "eos_token_id": list(self.eos_ids)} if self.own_settings else {},
        )

    def identity(self) -> dict[str, Any]:
        """What shards and heads record of the target they were made from."""
        return {
            "name": self.name,
            "revision": self.revision,
            "fingerprint": self.fingerprint,
            "dtype": dtype_name(self.dtype),
        }


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``fp32``, ``bf16`` or ``fp16``, or torch's own name for others."""
    long = str(dtype).removeprefix("torch.")
    return _LONG_NAMES.get(long, long)


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """Return a torch dtype for fp32, bf16, fp16 (long names too), None for ``auto``."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = _LONG_NAMES.get(dtype, dtype)
    if name == "auto":
        return None
    if name not in DTYPES:
        raise UserError(
            f"dtype {dtype}: wanted auto, fp32, bf16 or fp16{nearest(dtype, [*DTYPES, *_LONG_NAMES, 'auto'])}"
        )
    return DTYPES[name]


def default_device() -> torch.device:
    """Return this rank's GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", distributed.local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def pick_device(device: str | torch.device | None, option: str = "--device") -> torch.device:
    """Return the device asked for: None is the best there is, a plain ``cuda`` this rank's own GPU.

    Raises UserError, naming the command's `option`, for a device that does not exist here.
    """
    default = default_device()
    if device is None:
        return default
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"{option} {device}: wanted cpu, cuda or cuda:N") from error
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise UserError(f"{option} {device}: no CUDA device is visible here; use {option} cpu")
        if place.index is not None and place.index >= count:
            raise UserError(
                f"{option} {device}: {count} CUDA devices are visible, 0 to {count - 1}; use one of them"
            )
    return default if place.type == default.type and place.index is None else place


def on(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` the current GPU of this thread, which begins on the first, whatever its process uses.

    Page-locked memory takes a few hundred megabytes of the current GPU, were it the first one for all.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def load_target(
    target: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    device_map: str | dict[str, Any] | None = None,
    by_plan: bool = False,
) -> Target:
    """Load the frozen target for inference.

    `target` is a hub id, a directory in Hugging Face form, or a ``.gguf`` file (dequantised).
    ``dtype="auto"`` is bf16 for a checkpoint in half precision (or .gguf) where the device computes in
    bf16, else fp32. `device` defaults to this rank's GPU, else the CPU; `device_map` (for example
    ``"auto"``) spreads a model over devices instead; `by_plan` loads a part of every layer in each process of
    the group that torch has joined (tensor_parallel.py). Raises UserError, naming the target, when it can't
    be found, is incomplete or damaged, or isn't a causal language model.
    """
    wanted = parse_dtype(dtype)
    place = pick_device(device)
    model = checkpoint.load_model(str(target), wanted, place, trust_remote_code, device_map, by_plan)
    model.eval().requires_grad_(False)
    revision = getattr(model.config, "_commit_hash", None)
    return Target(str(target), revision, model, trust_remote_code)
