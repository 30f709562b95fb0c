"""Weights, gradients and optimizer state partitioned over processes by DeepSpeed.

Source: ZeRO (arXiv 1910.02054); stage 2 partitions gradients and optimizer state, stage 3 weights too.
A checkpoint is the same as without it, whole tensors by name, so a run may go on with another number of
processes, with another stage or without DeepSpeed.
"""

from __future__ import annotations

import importlib.resources
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eagle_train.config import OptimRecipe
from eagle_train.errors import UserError
from eagle_train.heads.disk import Head, build_head
from eagle_train.io.tensors import load_tensors
from eagle_train.io.text import read_json
from eagle_train.training.checkpoints import TENSORS
from eagle_train.training.processes import Processes
from eagle_train.training.step_result import StepResult
from eagle_train.training.steps import Step

if TYPE_CHECKING:
    from eagle_train.shards.batches import PackedBatch

STAGES = ("zero2", "zero3")
_STATE = ("exp_avg", "exp_avg_sq")
_OURS = {
    "optimizer": "optim",
    "scheduler": "schedule",
    "gradient_clipping": "optim.clip_norm",
    "bf16": "run.precision",
    "fp16": "run.precision",
    "amp": "run.precision",
}  # what the recipe decides, and where


def read_zero_config(name_or_path: str) -> dict[str, Any]:
    """Return a DeepSpeed configuration: built-in zero2 or zero3, or a JSON file. Raises UserError."""
    if name_or_path in STAGES:
        file = Path(str(importlib.resources.files("eagle_recipes") / f"deepspeed/{name_or_path}.json"))
    else:
        file = Path(name_or_path)
    config = read_json(file, f"give {' or '.join(STAGES)}, or the path of a DeepSpeed JSON file")
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        raise UserError(f"{file}: zero_optimization: got {zero!r}, wanted settings with a stage of 1, 2 or 3")
    stage = zero.get("stage")
    if stage not in (1, 2, 3):
        raise UserError(f"{file}: zero_optimization.stage: got {stage!r}, wanted 1, 2 or 3")
    for key, setting in _OURS.items():
        if key in config:
            raise UserError(f"{file}: {key}: the recipe decides that ({setting}); remove it")
    return config


class _Together(torch.autograd.Function):
    """Pass weights through, so that their gradients arrive together and in one order on every process."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return gradients


class _Unit(nn.Module):
    """A step as DeepSpeed takes it: tensors in and out, all its weights reduced as one.

    So processes whose work differs (fewer steps, nothing counted) still meet in the same collectives.
    Stages 1 and 2 reduce gradients in the order of their arrival, which `_Together` makes the same. Stage 3
    reduces a unit when autograd reaches its input `anchor`, which it does last.
    """

    def __init__(self, step: Step, stage: int) -> None:
        super().__init__()
        self.step, self.stage = step, stage

    def forward(self, batch: PackedBatch, counts: Tensor, anchor: Tensor) -> tuple[Tensor, ...]:
        if self.stage == 3:
            result = self.step(batch, counts)
        else:
            weights = dict(self.step.named_parameters())
            passed = dict(zip(weights, _Together.apply(*weights.values()), strict=True))
            result = torch.func.functional_call(self.step, passed, (batch, counts))
        return (result.loss + 0 * anchor, *result[1:])


class ZeroEngine:
    """The same as `engine.Engine` with weights in the arithmetic's precision and partitioned fp32 masters."""

    def __init__(
        self,
        processes: Processes,
        step: Step,
        recipe: OptimRecipe,
        dtype: torch.dtype,
        config: dict[str, Any],
    ) -> None:
        check_optimizer(recipe)
        deepspeed = _import()
        self.processes, self.head, self.recipe = processes, step.head, recipe
        self._stage = int(config["zero_optimization"]["stage"])
        whole = {name: value.detach().clone() for name, value in step.head.named_parameters()}
        unit = _Unit(step, self._stage)
        if self._stage == 3:
            deepspeed.utils.set_z3_leaf_modules(unit, [_Unit])
        optimizer = torch.optim.AdamW(
            step.head.parameters(),
            lr=recipe.lr,
            betas=recipe.betas,
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
        )
        settings = {
            **config,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,  # windows are cut by the loader
            "gradient_clipping": recipe.clip_norm,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "zero_force_ds_cpu_optimizer": False,
        }
        self._engine, *_ = deepspeed.initialize(
            model=unit, optimizer=optimizer, config=settings, dist_init_required=False
        )
        self._engine.optimizer.check_grad_overflow = True  # in float32 too
        self._set(whole)

    def autocast(self) -> Any:
        """Weights have the arithmetic's precision already."""
        return nullcontext()

    def accumulate(self, batch: PackedBatch, counts: Tensor, closes: bool) -> StepResult:
        """Add one micro-batch's gradient to the window's; `closes` says that it is the last of it."""
        self._engine.set_gradient_accumulation_boundary(closes)
        anchor = torch.zeros((), device=counts.device, requires_grad=True)
        result = StepResult(*self._engine(batch, counts, anchor))
        self._engine.backward(result.loss * self.processes.world)  # processes average; the sum is wanted
        if not closes:
            self._engine.step()
        return result

    def update(self, factor: float) -> float:
        """Take the step at `factor` times the peak learning rate, unless the gradient is not finite.

        Returns the gradient's norm before clipping.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self.recipe.lr * factor
        self._engine.step()
        return math.nan if self._engine.optimizer.overflow else float(self._engine.get_global_grad_norm())

    @contextmanager
    def evaluated(self) -> Iterator[Head]:
        """Give the head with all its weights on every process."""
        import deepspeed

        parameters = list(self.head.parameters())
        gathered = deepspeed.zero.GatheredParameters(parameters) if self._stage == 3 else nullcontext()
        with gathered, torch.no_grad():
            yield self.head

    @contextmanager
    def saved(self) -> Iterator[tuple[Head, dict[str, Tensor]]]:
        """Give what a checkpoint holds: a whole float32 head, and the optimizer's state by parameter."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        weights, trainer = {}, {}
        for name, parameter in self.head.named_parameters():
            weights[name] = safe_get_full_fp32_param(parameter).float().cpu()
            for key in _STATE:
                trainer[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key).cpu().clone()
            trainer[f"{name}/step"] = torch.tensor(float(self._num_steps()))
        whole = build_head(self.head.config, self.head.draft_ids.cpu())
        whole.load_state_dict(weights, strict=False)
        yield whole, trainer

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint whose head this engine was made of. Raises UserError."""
        tensors, _ = load_tensors(folder / TENSORS)
        parameters = dict(self.head.named_parameters())
        for name in (f"{name}/{key}" for name in parameters for key in (*_STATE, "step")):
            if name not in tensors:
                raise UserError(f"{folder / TENSORS}: lacks {name}; not an AdamW run of this head")
        self._begin_state(float(tensors[f"{next(iter(parameters))}/step"]))
        for name, parameter in parameters.items():
            for key in _STATE:
                self._put(parameter, tensors[f"{name}/{key}"], key)

    def _begin_state(self, steps: float) -> None:
        """Make the optimizer's state, which before its first step is not there to be set."""
        optimizer = self._engine.optimizer
        whole = self._stage < 3
        masters = (
            optimizer.single_partition_of_fp32_groups if whole else optimizer.fp32_partitioned_groups_flat
        )
        for master in masters:
            zeros = {key: torch.zeros_like(master, requires_grad=False) for key in _STATE}
            optimizer.optimizer.state[master] = {"step": torch.tensor(steps), **zeros}
        if whole:
            optimizer._lazy_init_hp_params_optimizer_state()

    def _num_steps(self) -> float:
        return float(next(iter(self._engine.optimizer.optimizer.state.values()))["step"])

    def _set(self, weights: dict[str, Tensor]) -> None:
        """Put float32 weights into the masters, which DeepSpeed makes from rounded ones."""
        for name, parameter in self.head.named_parameters():
            self._put(parameter, weights[name])

    def _put(self, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """Set a parameter's master, or `key` of its optimizer state, to a whole float32 tensor."""
        from deepspeed import utils

        state = () if key is None else (key,)
        if self._stage < 3:
            put = utils.safe_set_full_fp32_param if key is None else utils.safe_set_full_optimizer_state
            put(parameter, value, *state)
            return
        # equal shares, the last one padded, which DeepSpeed's own function for whole tensors does not cut
        share = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        value = nn.functional.pad(value.flatten(), (0, share * self.processes.world - value.numel()))
        put = utils.safe_set_local_fp32_param if key is None else utils.safe_set_local_optimizer_state
        put(parameter, value.narrow(0, share * self.processes.rank, share), *state)


def check_optimizer(recipe: OptimRecipe) -> None:
    """Refuse what needs whole matrices or whole weights. Raises UserError."""
    if recipe.name != "adamw":
        raise UserError(f"--deepspeed: optim.name {recipe.name} needs whole matrices; set optim.name=adamw")
    if recipe.ema:
        raise UserError("--deepspeed: keeps no average of the weights; set optim.ema=0")


def _import() -> Any:
    """Import DeepSpeed and let it take over the processes that are joined already."""
    if not torch.distributed.is_initialized():
        raise UserError("--deepspeed: partitions over processes; give --processes 2 or more, or use torchrun")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise UserError("--deepspeed: not installed; pip install 'eagle-train[deepspeed]'") from error
    deepspeed.logger.setLevel("WARNING")
    renamed = r"`torch\.distributed\.\w+` is deprecated"  # at every call: DeepSpeed's to change
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    if not torch.cuda.is_available():  # gloo alone does; the op for shared memory would be compiled first
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)
    return deepspeed
