"""From shards and a recipe to the head that is trained and the step that trains it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import Head, build_head
from eagle_train.heads.draft_vocab import choose_draft_ids, coverage
from eagle_train.heads.eagle1 import Eagle1Head
from eagle_train.heads.eagle3 import Eagle3Head
from eagle_train.shards.schema import holds_feature_of
from eagle_train.training.checkpoints import head_folder, read_head
from eagle_train.training.eagle1_step import Eagle1Step
from eagle_train.training.eagle3_step import Eagle3Step
from eagle_train.training.target_layer import start_from_layer

if TYPE_CHECKING:
    from eagle_train.shards.frozen_target import FrozenTarget
    from eagle_train.shards.reader import Shards


def check_shards(recipe: Recipe, shards: Shards) -> None:
    """Raise UserError where the shards do not hold what the recipe's head reads."""
    kind, features = recipe.head.kind, shards.info["features"]
    if not holds_feature_of(kind, features):
        raise UserError(
            f"{shards.folder}: features of {features}; recipe {recipe.name} trains {kind}. "
            f"Re-run: eagle extract --for {kind}"
        )
    captured, wanted = tuple(shards.info["layer_ids"]), recipe.head.layer_ids
    if wanted and captured != wanted:
        raise UserError(
            f"{shards.folder}: captured layers {captured}; recipe {recipe.name} wants {wanted}. "
            f"Re-run: eagle extract --for {kind} --layers {','.join(map(str, wanted))}"
        )


def wanted_config(recipe: Recipe, shards: Shards, frozen: FrozenTarget) -> HeadConfig:
    """Return the config of the head that the recipe asks for on this target."""
    settings, vocabulary = recipe.head, frozen.vocab_size
    if (settings.draft_vocab_size or 0) > vocabulary:
        raise UserError(
            f"{shards.folder}: the target has {vocabulary} tokens; recipe {recipe.name} wants "
            f"head.draft_vocab_size {settings.draft_vocab_size}. Set at most {vocabulary}, or null for all"
        )
    return HeadConfig.for_target(
        frozen.config,
        settings.kind,
        vocab_size=vocabulary,
        draft_vocab_size=settings.draft_vocab_size or vocabulary,
        feature_layers=tuple(shards.info["layer_ids"]) if settings.kind == "eagle3" else None,
        num_hidden_layers=settings.num_hidden_layers,
        intermediate_size=settings.intermediate_size,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        qk_norm=settings.qk_norm,
        target=str(shards.info["target"]["name"]),
    )


def new_head(recipe: Recipe, shards: Shards, frozen: FrozenTarget) -> Head:
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
        head = build_head(config, draft_ids)
    if isinstance(head, Eagle3Head) and head.lm_head.weight.shape[1] == frozen.hidden_size:
        with torch.no_grad():
            head.lm_head.weight.copy_(frozen.lm_head[head.draft_ids].float() * frozen.logit_scale)
    if recipe.head.init_layer is not None:
        start_from_layer(head, shards, recipe.head.init_layer)
    return head.float()


def warm_head(source: str | Path, recipe: Recipe, shards: Shards, frozen: FrozenTarget) -> Head:
    """Return the head at `source` (a run or a head directory), with its own draft vocabulary.

    Raises UserError naming the first difference from what the recipe and these shards ask for.
    """
    head = read_head(head_folder(source))
    wanted = wanted_config(recipe, shards, frozen)
    have = dataclasses.replace(head.config, dtype=wanted.dtype, target=wanted.target)
    if not have.feature_layers:  # a foreign config without ids: engines take the default layers
        have = dataclasses.replace(have, feature_layers=have.layers_for(int(shards.info["num_layers"])))
    for field in dataclasses.fields(HeadConfig):
        found, asked = getattr(have, field.name), getattr(wanted, field.name)
        if field.name != "max_position_embeddings" and found != asked:
            raise UserError(
                f"--init-from {source}: {field.name} {found}; recipe {recipe.name} on these shards wants "
                f"{asked}. Give another head, or set the recipe to the head's"
            )
    head.config = have
    return head


def head_step(head: Head, frozen: FrozenTarget, recipe: Recipe) -> Eagle1Step | Eagle3Step:
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
    return Eagle3Step(head, frozen, **shared)


def vocabulary_coverage(head: Head, shards: Shards) -> float:
    """Return the share of supervised tokens that the head can draft."""
    if not head.config.reduced_vocabulary:
        return 1.0
    return coverage(head.draft_ids.cpu(), shards.supervised_frequencies)


def num_parameters(module: nn.Module) -> int:
    """Return how many numbers are trained."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
