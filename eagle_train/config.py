"""Recipes: everything that can be set about a run, as one frozen dataclass.

A recipe names only what differs from the defaults below, or from another recipe (``extends:``). An
unknown key, a wrong type or an impossible combination is refused (recipe_checks.py); files are read by
recipe_files.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml


@dataclass(frozen=True)
class HeadRecipe:
    """The draft head's shape. All else (widths, heads, RoPE, epsilon) comes from the target."""

    kind: Literal["eagle1", "eagle3", "medusa"] = "eagle3"  # of head
    layer_ids: tuple[int, ...] = ()  # captured layers, hs convention; () takes all that the shards hold
    draft_vocab_size: int | None = None  # most frequent supervised tokens; null = all of the target's
    num_hidden_layers: int = 1  # decoder layers; those past the first are plain Llama layers
    fc_norm: bool = False  # EAGLE-3.1: an RMSNorm on each feature before fc
    norm_output: bool = False  # EAGLE-3.1: the normed output is fed to the next step
    norm_before_fc: bool = False  # one RMSNorm on all features together before fc
    norm_before_residual: bool = False  # the first layer's residual is the normed feature; not in SGLang
    qk_norm: bool = False  # norms on queries and keys as in Qwen3; served by vLLM alone
    intermediate_size: int | None = None  # null = the target's
    medusa_heads: int | None = None  # of kind medusa: tokens guessed ahead
    init_layer: int | None = None  # start the first layer from this layer of the target, counted from 0


@dataclass(frozen=True)
class LossRecipe:
    """What is minimised: for EAGLE-3 the token loss alone, for EAGLE-1 beside the regression of features."""

    ttt_steps: int = 7  # steps of the training-time test; for EAGLE-1 more than one is HASS
    step_decay: float = 0.8  # weight of step i is step_decay ** i
    # of the token loss, between the target's law and the head's (losses/divergences.py)
    divergence: Literal["cross_entropy", "kl", "reverse_kl", "tv", "lk"] = "cross_entropy"
    top_k: int = 10  # HASS: so many of the target's top tokens
    top_k_weight: float = 0.0  # count so much more, in a loss added to the token loss; 0 = none
    feature_weight: float = 1.0  # EAGLE-1: SmoothL1 on the predicted feature
    token_weight: float = 0.1  # EAGLE-1: the token loss
    noise: float = 0.1  # EAGLE-1: features get uniform(-noise, noise) * 512 / length, in training only


@dataclass(frozen=True)
class OptimRecipe:
    """AdamW on all parameters, or Muon on the matrices of fc and layers and AdamW on the rest."""

    name: Literal["adamw", "muon"] = "adamw"  # the optimizer
    lr: float = 5e-5  # of AdamW
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW: decay of the gradient's mean and of its square's
    eps: float = 1e-8  # of AdamW
    weight_decay: float = 0.0  # of AdamW, decoupled
    matrix_lr: float = 0.02  # of Muon
    matrix_momentum: float = 0.95  # of Muon
    matrix_weight_decay: float = 0.0  # of Muon, decoupled
    clip_norm: float = 0.5  # of the whole gradient; 0 = no clipping
    ema: float = 0.0  # decay of an average of the weights, which is evaluated and saved; 0 = none


@dataclass(frozen=True)
class ScheduleRecipe:
    """Learning rate: linear warm-up, then a decay down to ``final`` of the peak at the budget's end."""

    shape: Literal["cosine", "linear", "constant", "wsd"] = "cosine"  # of the decay
    warmup_steps: int = 0  # optimizer steps
    final: float = 0.0  # share of the peak that is left at the end
    decay_share: float = 0.2  # of wsd: constant up to the last such share of the run, then linear


@dataclass(frozen=True)
class DataRecipe:
    """What an optimizer step sees: whole rows, up to a number of tokens or of rows."""

    tokens_per_step: int | None = 16384  # at most, but a longer row is a step alone
    rows_per_step: int | None = None  # in place of that
    micro_tokens: int = 4096  # tokens of one forward; bounds memory, changes no result
    held_out: float = 64.0  # conversations: a share (below 1) or a number


@dataclass(frozen=True)
class RunRecipe:
    """How long, how exact, how often.

    One of epochs, steps, tokens; minutes may cap it or stand alone. Whatever of the four a recipe or --set
    names replaces all that the recipe below it named.
    """

    epochs: int | None = None  # times that each row is seen
    steps: int | None = None  # optimizer steps, skipped ones included
    tokens: int | None = None  # of rows seen, prompts included; the step that reaches it is the last
    minutes: float | None = None  # by the clock, so a resumed run is not bit-equal to an unbroken one
    seed: int = 0  # of new weights, the order of rows and noise
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # of arithmetic; weights and Adam stay fp32
    eval_every: int = 500  # optimizer steps
    eval_gamma: int = 3  # guesses of the chain whose acceptance length is predicted
    save_every: int = 1000  # optimizer steps
    log_every: int = 10  # optimizer steps
    keep_last: int = 2  # checkpoints kept beside the best
    patience: int | None = None  # evaluations without a new best before the run ends; null = never
    other_target: bool = False  # --init-from may take a head of a target with other weights
    max_skipped: int = 20  # steps whose gradient was not finite, before the run stops


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe. ``name`` is the file's stem, for messages."""

    name: str = "recipe"
    head: HeadRecipe = field(default_factory=HeadRecipe)
    loss: LossRecipe = field(default_factory=LossRecipe)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    run: RunRecipe = field(default_factory=RunRecipe)

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain nested dicts and lists, every key written out."""
        return _plain({key: value for key, value in dataclasses.asdict(self).items() if key != "name"})

    def to_yaml(self) -> str:
        """Return the recipe as YAML that `load_recipe` reads back to an equal one."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


SECTIONS = {f.name: f.default_factory for f in dataclasses.fields(Recipe) if f.name != "name"}
# Alternatives: a recipe that names one of a group drops what the recipe it extends chose from that group.
ONE_OF = {
    "run": (("epochs", "steps", "tokens", "minutes"),),
    "data": (("tokens_per_step", "rows_per_step"),),
}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value
