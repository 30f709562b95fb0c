"""From shards and a recipe to the head that is trained and the step that trains it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.heads.config import HeadConfig, check_window
from eagle_train.heads.disk import Head, build_head
from eagle_train.heads.draft_vocab import choose_draft_ids, coverage
from eagle_train.heads.eagle1 import Eagle1Head
from eagle_train.heads.eagle3 import Eagle3Head
from eagle_train.heads.foreign import read_any
from eagle_train.heads.medusa import MedusaHead
from eagle_train.shards.codecs import refuse_top_labels
from eagle_train.shards.schema import holds_feature_of
from eagle_train.training.checkpoints import head_folder
from eagle_train.training.eagle1_step import Eagle1Step
from eagle_train.training.eagle3_step import Eagle3Step
from eagle_train.training.medusa_step import MedusaStep
from eagle_train.training.steps import Step
from eagle_train.training.target_layer import start_from_layer
from eagle_train.training.trained_on import other_weights

if TYPE_CHECKING:
    from eagle_train.shards.frozen_target import FrozenTarget
    from eagle_train.shards.reader import Shards
    from eagle_train.shards.row_source import RowSource

_KEPT = (  # of a head that training starts from, whatever the recipe says
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
    "rms_norm_eps",
    "norm_before_fc",
    "norm_before_residual",
    "sliding_window",
    "fc_bias",
    "attention_bias",
)


def check_shards(recipe: Recipe, shards: Shards) -> None:
    """Let the shards give what the recipe's head reads. Raises UserError where they do not hold it."""
    kind, features = recipe.head.kind, shards.info["features"]
    if not holds_feature_of(kind, features):
        raise UserError(
            f"{shards.folder}: features of {features}; recipe {recipe.name} trains {kind}. "
            f"Re-run: eagle extract --for {kind}"
        )
    if top := shards.info.get("label_top_k"):
        refuse_top_labels(kind, top, str(shards.folder))
        check_labels(recipe, top, f"{shards.folder}: holds the {top} likeliest tokens of each label")
    if kind == "eagle3" and recipe.head.layer_ids:
        shards.read_layers(recipe.head.layer_ids, f"recipe {recipe.name}")


def check_labels(recipe: Recipe, label_top_k: int, where: str) -> None:
    """Raise UserError, beginning with `where`, where the loss counts more than so many tokens of a label."""
    if label_top_k and recipe.loss.top_k_weight and recipe.loss.top_k > label_top_k:
        raise UserError(
            f"{where}; recipe {recipe.name} counts loss.top_k {recipe.loss.top_k} of them more. Set at most "
            f"{label_top_k}"
        )


def wanted_config(recipe: Recipe, shards: RowSource, frozen: FrozenTarget) -> HeadConfig:
    """Return the config of the head that the recipe asks for on this target."""
    info = shards.info
    config = config_on(recipe, frozen.config, frozen.vocab_size, info["layer_ids"], str(shards.folder))
    return dataclasses.replace(config, target=str(info["target"]["name"]))


def config_on(
    recipe: Recipe, target_config: dict[str, Any], vocab_size: int, layer_ids: Sequence[int], where: str
) -> HeadConfig:
    """Return the config of the recipe's head on a target of this (text) config, reading these layers.

    Raises UserError, beginning with `where`, for a draft vocabulary above the target's.
    """
    settings = recipe.head
    if (settings.draft_vocab_size or 0) > vocab_size:
        raise UserError(
            f"{where}: the target has {vocab_size} tokens; recipe {recipe.name} wants "
            f"head.draft_vocab_size {settings.draft_vocab_size}. Set at most {vocab_size}, or null for all"
        )
    return HeadConfig.for_target(
        target_config,
        settings.kind,
        vocab_size=vocab_size,
        draft_vocab_size=settings.draft_vocab_size or vocab_size,
        feature_layers=tuple(layer_ids) if settings.kind == "eagle3" else None,
        num_hidden_layers=settings.num_hidden_layers,
        intermediate_size=settings.intermediate_size,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        norm_before_fc=settings.norm_before_fc,
        norm_before_residual=settings.norm_before_residual,
        qk_norm=settings.qk_norm,
        medusa_heads=settings.medusa_heads,
    )


def new_head(recipe: Recipe, shards: RowSource, frozen: FrozenTarget) -> Head:
    """Return a head with random weights of the recipe's seed.

    Its draft vocabulary is the tokens most often supervised in the shards, its lm_head starts from the
    target's rows, its first layer from the target's where the recipe says so.
    """
    config = wanted_config(recipe, shards, frozen)
    draft_ids = None
    if config.reduced_vocabulary:
        draft_ids = choose_draft_ids(
            shards.supervised_frequencies, config.vocab_size, config.draft_vocab_size
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.run.seed)
        head = _built(config, draft_ids, recipe.name)
    if isinstance(head, Eagle3Head) and head.lm_head.weight.shape[1] == frozen.hidden_size:
        with torch.no_grad():
            head.lm_head.weight.copy_(frozen.lm_head[head.draft_ids].float() * frozen.logit_scale)
    if isinstance(head, MedusaHead):
        with torch.no_grad():
            for weight in head.lm_heads.parameters():
                weight.copy_(frozen.lm_head[head.draft_ids].float() * frozen.logit_scale)
    if recipe.head.init_layer is not None:
        start_from_layer(head, shards, recipe.head.init_layer)
    return head.float()


def _built(config: HeadConfig, draft_ids: Tensor | None, name: str) -> Head:
    try:
        return build_head(config, draft_ids)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        raise UserError(
            f"recipe {name}: no memory for its head (intermediate_size {config.intermediate_size:,}, layers "
            f"{config.num_hidden_layers}, draft vocabulary {config.draft_vocab_size:,}); choose a smaller one"
        ) from error


def warm_head(source: str | Path, recipe: Recipe, shards: RowSource, frozen: FrozenTarget) -> Head:
    """Return the head at `source` (a run or a head directory, also another's), with its own draft vocabulary.

    Settings that no recipe names, such as RoPE, stay the head's. Raises UserError naming the first difference
    from what the recipe and these shards ask for.
    """
    if recipe.head.init_layer is not None:
        raise UserError(
            f"--init-from {source}: head.init_layer {recipe.head.init_layer} also says what to start from; "
            "leave one of the two out (--set head.init_layer=null)"
        )
    depth, tables = int(shards.info["num_layers"]), (frozen.embedding, frozen.lm_head)
    if not recipe.run.other_target and (words := other_weights(source, shards.info["target"])):
        raise UserError(f"--init-from {words}; to start from it all the same --set run.other_target=true")
    head = read_any(head_folder(source), num_target_layers=depth, tables=tables).float()
    check_window(head.config, int(shards.lengths.max()), str(source))
    wanted = wanted_config(recipe, shards, frozen)
    have = dataclasses.replace(head.config, dtype=wanted.dtype, target=wanted.target)
    if not have.feature_layers:  # a foreign config without ids: engines take the default layers
        have = dataclasses.replace(have, feature_layers=have.layers_for(depth))
    kept = _KEPT if recipe.head.intermediate_size is not None else (*_KEPT, "intermediate_size")
    for field in dataclasses.fields(HeadConfig):
        found, asked = getattr(have, field.name), getattr(wanted, field.name)
        if field.name not in kept and found != asked:
            raise UserError(
                f"--init-from {source}: {field.name} {found}; recipe {recipe.name} on these shards wants "
                f"{asked}. Give another head, or set the recipe to the head's"
            )
    head.config = have
    return head


def head_step(head: Head, frozen: FrozenTarget, recipe: Recipe) -> Step:
    """Return the module whose forward gives the loss of a packed batch."""
    loss = recipe.loss
    token_weight = loss.token_weight if isinstance(head, Eagle1Head) else 1.0
    shared: dict[str, Any] = {
        "num_steps": loss.ttt_steps,
        "step_decay": loss.step_decay,
        "divergence": loss.divergence,
        "top_k": (loss.top_k, loss.top_k_weight / token_weight) if loss.top_k_weight else None,
    }
    if isinstance(head, Eagle1Head):  # the loader adds the noise, row by row
        return Eagle1Step(
            head, frozen, feature_weight=loss.feature_weight, token_weight=loss.token_weight, **shared
        )
    if isinstance(head, MedusaHead):
        del shared["num_steps"]
        return MedusaStep(head, frozen, **shared)
    return Eagle3Step(head, frozen, **shared)


def vocabulary_coverage(head: Head, shards: RowSource) -> float:
    """Return the share of supervised tokens that the head can draft."""
    if not head.config.reduced_vocabulary:
        return 1.0
    return coverage(head.draft_ids.cpu(), shards.supervised_frequencies)


def num_parameters(module: nn.Module) -> int:
    """Return how many numbers are trained."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
