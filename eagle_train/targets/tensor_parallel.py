"""One model on several processes: the first one works, the others make its every call too.

transformers' plan deals every layer out, and each forward sums what the processes hold: so all of them must
make the same calls in the same order. The first one tells the others each call before it makes it; they make
it and drop what comes out. Calls are told through a group of its own, on the CPU, where waiting is no fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as torch_distributed

from eagle_train import distributed
from eagle_train.errors import UserError
from eagle_train.targets import checkpoint, plans
from eagle_train.targets.cut_check import check_cut
from eagle_train.targets.fingerprint import weights_fingerprint
from eagle_train.targets.load import Target, load_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SUMS = timedelta(hours=2)  # processes load at different speeds
_CALLS = timedelta(days=7)  # between two calls the first one may wait for shards that others make
_LOAD, _END = "load", "end"


@dataclass
class Group:
    """This process and the others that hold the model together. Use through `joined`."""

    size: int
    device: torch.device
    calls: Any  # torch's group through which calls are told
    in_step: bool = True  # False from the beginning of a call until all have made it

    @property
    def leads(self) -> bool:
        """True on the one process that works."""
        return distributed.is_main()

    def load(self, name: str, *, dtype: torch.dtype, threads: int, trust_remote_code: bool) -> Target:
        """Load the target in all processes; what the first one then does with it, the others do too.

        On a CPU each of them computes with `threads`. Raises UserError as `load_target` does, and where the
        plan does not suit the target (`check_cut`).
        """
        given = {"name": name, "dtype": dtype, "trust_remote_code": trust_remote_code}
        with self._told(_LOAD, {**given, "threads": threads}):
            own = _load(self, name, dtype, trust_remote_code)
        target = LeadingTarget(own.name, own.revision, own.model, trust_remote_code, group=self)
        check_cut(target, target.skeleton)
        return target

    def call(self, name: str, target: Target, **given: Any) -> Any:
        """Make one of `_CALLS_OF_ALL` in all processes; return what it returns here."""
        with self._told(name, given), torch.no_grad():
            return _CALLS_OF_ALL[name](target, **given)

    def follow(self) -> None:
        """Make the calls that the first process tells, until it ends."""
        target: Target | None = None
        with _lost("the first process"), torch.no_grad():
            while (told := self._hear())[0] != _END:
                name, given = told
                try:
                    if name == _LOAD:
                        torch.set_num_threads(given.pop("threads"))
                        target = _load(self, **given)
                    else:
                        assert target is not None
                        _CALLS_OF_ALL[name](target, **given)
                except _CannotLoadError:
                    return  # the first process says why
                except torch.OutOfMemoryError as error:
                    raise UserError(
                        f"process {distributed.rank()}: {self.device}: out of memory; give a smaller "
                        "--batch-tokens with another --out"
                    ) from error

    def end(self) -> None:
        """Let the others go, unless they are in the midst of a call: then they end with this process."""
        if self.in_step:
            with _lost("another process"):
                self._tell(_END, {})

    @contextlib.contextmanager
    def _told(self, name: str, given: dict[str, Any]) -> Iterator[None]:
        self.in_step = False
        with _lost("another process"):
            self._tell(name, given)
            yield
        self.in_step = True

    def _tell(self, name: str, given: dict[str, Any]) -> None:
        tensors = {key: value.contiguous() for key, value in given.items() if isinstance(value, Tensor)}
        shapes = {key: (tuple(value.shape), value.dtype) for key, value in tensors.items()}
        plain = {key: value for key, value in given.items() if key not in tensors}
        torch_distributed.broadcast_object_list([name, plain, shapes], src=0, group=self.calls)
        for tensor in tensors.values():
            torch_distributed.broadcast(tensor.to(self.device), src=0)

    def _hear(self) -> tuple[str, dict[str, Any]]:
        heard: list[Any] = [None, None, None]
        torch_distributed.broadcast_object_list(heard, src=0, group=self.calls)
        name, given, shapes = heard
        for key, (shape, dtype) in shapes.items():
            given[key] = torch.empty(shape, dtype=dtype, device=self.device)
            torch_distributed.broadcast(given[key], src=0)
        return name, given


@dataclass
class LeadingTarget(Target):
    """The target in the first process: each use of its weights is told to the others."""

    group: Group = field(kw_only=True)

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.group.device

    @property
    def vocab_size(self) -> int:
        """V, the number of logits (padding rows of the lm_head included)."""
        return self._shapes[self._names[id(self.lm_head.weight)]][0]

    @cached_property
    def fingerprint(self) -> str:
        """That of the same weights in one process."""
        return weights_fingerprint(self.model, self.config, self.whole)

    def run_body(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """As `Target.run_body`, in all processes; a cache cannot be shared with them."""
        assert cache is None
        given = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
        return self.group.call("run_body", self, **{k: v for k, v in given.items() if v is not None})

    def logits(self, last: Tensor) -> Tensor:
        """As `Target.logits`, in all processes."""
        return self.group.call("logits", self, last=last)

    def run_model(self, input_ids: Tensor, **arguments: Any) -> Any:
        """As `Target.run_model`, in all processes."""
        return self.group.call("run_model", self, input_ids=input_ids, **arguments)

    def whole(self, name: str, weight: Tensor) -> Tensor:
        """Return the model's parameter `name`, put together from all processes."""
        return self.group.call("whole", self, parameter=name, shape=self._shapes[name])

    def output_weights(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `Target.output_weights`, put together; embedding and lm_head stay one where they are tied."""
        rows: Any = self.model.get_input_embeddings().weight
        head, bias = self.lm_head.weight, getattr(self.lm_head, "bias", None)
        embedding = self.whole(self._names[id(rows)], rows)
        return (
            embedding,
            embedding if head is rows else self.whole(self._names[id(head)], head),
            None if bias is None else self.whole(self._names[id(bias)], bias),
        )

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(weight): name for name, weight in self.model.named_parameters()}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes: some versions of transformers leave plain parts, which do not say of what."""
        return {name: tuple(weight.shape) for name, weight in self.skeleton.named_parameters()}

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The whole model without weights."""
        config = checkpoint.load_config(self.name, self.trust_remote_code)
        return checkpoint.skeleton(config, self.trust_remote_code)


def _whole(target: Target, parameter: str, shape: tuple[int, ...]) -> Tensor:
    weight = target.model.get_parameter(parameter).detach()
    return plans.whole(target.model, parameter, weight, shape)


_CALLS_OF_ALL: dict[str, Any] = {
    "run_body": Target.run_body,
    "logits": Target.logits,
    "run_model": Target.run_model,
    "whole": _whole,
}


class _CannotLoadError(UserError):
    """Raised in all processes where one of them cannot load its part, or the parts do not run together."""


def _load(group: Group, name: str, dtype: torch.dtype, trust_remote_code: bool) -> Target:
    """Load this process's part, and see whether the parts run together."""
    target, fault = None, None
    try:
        target = load_target(
            name, dtype=dtype, device=group.device, trust_remote_code=trust_remote_code, by_plan=True
        )
    except UserError as error:
        fault = str(error)
    _agree(group, fault)
    assert target is not None
    try:
        with torch.no_grad():
            target.run_model(torch.zeros(1, 2, dtype=torch.int64, device=group.device))
    except checkpoint.ODD as error:
        if _is_lost(error):
            raise
        fault = (
            f"--tensor-parallel {group.size}: {name}: transformers' plan does not suit it "
            f"({str(error).strip().splitlines()[0]}); use --device-map auto"
        )
    _agree(group, fault)
    return target


def _agree(group: Group, fault: str | None) -> None:
    """Raise in all processes what one of them cannot do, so that none waits for it."""
    faults: list[str | None] = [None] * group.size
    torch_distributed.all_gather_object(faults, fault, group=group.calls)
    for rank, text in enumerate(faults):
        if text is not None:
            raise _CannotLoadError(text if rank == 0 else f"process {rank}: {text}")


@contextlib.contextmanager
def joined(size: int, place: torch.device) -> Iterator[Group]:
    """Join the processes that torchrun started into one group, which holds one model together.

    The first one then works, the others `Group.follow` it; `place` is this one's device, by `check_devices`.
    Raises UserError unless they are `size`.
    """
    if place.type == "cuda":
        torch.cuda.set_device(place)
    torch_distributed.init_process_group(
        "nccl" if place.type == "cuda" else "gloo",
        timeout=_SUMS,
        device_id=place if place.type == "cuda" else None,
    )
    if (seen := torch_distributed.get_world_size()) != size:
        raise UserError(f"--tensor-parallel {size}: torch sees {seen} processes; start as many")
    group = Group(size, place, torch_distributed.new_group(backend="gloo", timeout=_CALLS))
    try:
        yield group
    finally:
        if group.leads:
            group.end()
    torch_distributed.destroy_process_group()  # not after an error: the others may be waiting


@contextlib.contextmanager
def _lost(who: str) -> Iterator[None]:
    """Say in one line that another process has ended in the midst of a call."""
    try:
        yield
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        raise UserError(
            f"--tensor-parallel: {who} of the group has ended; its message, if any, is near; "
            "give the same command again"
        ) from error


def _is_lost(error: BaseException) -> bool:
    return isinstance(error, torch_distributed.DistError) or "gloo" in str(error)
