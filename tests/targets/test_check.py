"""The check at the start finds features taken at the wrong place, and lets rounding pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.shards.codecs import CODECS, decode, encode, rounding
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.shards.plan import RowTable
from eagle_train.targets import check
from eagle_train.targets import load as load_room
from eagle_train.targets.batch import BatchFeatures, RowBatch, load_batch, run_batch
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.load import Target, load_target
from eagle_train.targets.output_map import OutputMap
from eagle_train.targets.survey import Survey, survey

Start = Callable[..., None]
run, load = run_batch, load_target


@pytest.fixture
def start(tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path) -> Start:
    """Run the check on the first batch of the tiny rows: every label position is compared."""

    def call(codec: str = "bf16", dtype: str = "fp32") -> None:
        work: Survey = survey(
            tiny_rows_dir, str(tiny_target_dir), tmp_path / "out", codec=codec, dtype=dtype, device="cpu"
        )
        target = load(tiny_target_dir, dtype=dtype, device="cpu")
        rows = work.plan.shards[0].batches[0]
        batch = load_batch(work.dataset, work.table, rows, target.vocab_size, target.device)
        with FeatureTap(target, (2, 4, 5)) as tap:
            features = run(tap, batch)
            compared = check.check_start(tap, batch, features, work.table, work.plan.setting)
        assert compared == len(batch.label_at) > 1000

    return call


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        ("fp32", "fp32"),
        ("bf16", "fp32"),
        ("bf16", "bf16"),
        ("fp8", "fp32"),
        ("int8", "fp32"),
        ("fp8", "bf16"),
    ],
)
def test_what_is_stored_gives_back_the_models_logits_everywhere(start: Start, codec: str, dtype: str) -> None:
    start(codec, dtype)


def test_own_logits_in_pieces_cover_every_position_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_MOST_LOGITS", 300 * 24 * 10)  # ten positions of each row at once
    start()


def test_models_that_cannot_keep_some_logits_are_compared_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    own = LlamaForCausalLM.forward

    def forward(
        self: Any, input_ids: Any = None, use_cache: Any = None, output_hidden_states: Any = None
    ) -> Any:
        return own(self, input_ids=input_ids, use_cache=use_cache, output_hidden_states=output_hidden_states)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    start()


@pytest.mark.parametrize("codec", ["bf16", "int8"])  # however coarse the codec
@pytest.mark.parametrize("wrong", [OutputMap(multiply=0.99), OutputMap(softcap=20.0)], ids=["scale", "cap"])
def test_an_unknown_scaling_of_the_logits_is_found(
    start: Start, monkeypatch: pytest.MonkeyPatch, wrong: OutputMap, codec: str
) -> None:
    monkeypatch.setattr(load_room, "output_map", lambda config: wrong)
    with pytest.raises(
        UserError, match=r"disagree with the model's own at \d+ of 1\d+ label positions; first"
    ):
        start(codec)


def test_a_norm_applied_twice_is_found(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Target.run_body
    monkeypatch.setattr(
        Target, "run_body", lambda self, ids, **more: self.model.model.norm(own(self, ids, **more))
    )
    with pytest.raises(UserError, match=r"disagree .* at row \w{16}-0, position \d+"):
        start()


def test_layers_off_by_one_are_found(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Target.layers.func  # type: ignore[attr-defined]
    monkeypatch.setattr(Target, "layers", property(lambda self: list(layers(self))[1:]))
    with pytest.raises(UserError, match=r"entering layer 2 differs from the model's hidden_states\[2\]"):
        start()


def test_states_of_the_wrong_position_are_found(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_early(tap: FeatureTap, batch: RowBatch) -> BatchFeatures:
        return run_batch(tap, replace(batch, label_at=batch.label_at - 1))

    monkeypatch.setitem(globals(), "run", one_early)
    with pytest.raises(UserError, match="disagree with the model's own"):
        start()


@pytest.mark.parametrize(
    ("dtype", "value", "gain", "words"),
    [
        (
            "fp32",
            torch.nan,
            1.0,
            r"its weight \S+k_proj.weight holds NaN or infinite .*; fetch its files again",
        ),
        ("bf16", torch.nan, 1.0, r"its weight \S+k_proj.weight holds NaN"),
        ("bf16", torch.inf, 1.0, "cannot be run in bf16 here: try --dtype fp32"),  # may be finite in the file
        ("fp32", 0.0, 3e38, "gives them in fp32 with finite weights: its config may be another model's"),
    ],
)
def test_what_is_at_fault_where_no_feature_is_finite_is_said(
    start: Start, monkeypatch: pytest.MonkeyPatch, dtype: str, value: float, gain: float, words: str
) -> None:
    def damaged(*given: Any, **more: Any) -> Target:
        target = load_target(*given, **more)
        for layer in target.layers:
            layer.self_attn.k_proj.weight.fill_(value)
        target.body.norm.weight.mul_(gain)
        target.body.layers[0].mlp.down_proj.weight.mul_(gain)
        return target

    monkeypatch.setitem(globals(), "load", damaged)
    with pytest.raises(
        UserError, match=f"features of the first batch are NaN or infinite; .*{words}"
    ) as caught:
        start(dtype=dtype)
    assert ("try --dtype" in str(caught.value)) == (value == torch.inf)


def _compare(frozen: FrozenTarget, hidden: torch.Tensor, own: torch.Tensor, codec: str) -> int:
    count = len(hidden)
    at = torch.arange(count)
    batch = RowBatch((0,), at[None], at, at, [count])
    table = RowTable(np.array([count]), [[(1, count - 1)]], ["r"], ["c"])
    values, scale = encode(CODECS[codec], hidden, 1)
    moved = rounding(CODECS[codec], decode(values, scale), scale)
    use = torch.ones(count, dtype=torch.bool)
    return check._compare(frozen, hidden, moved, own, use, at, batch, table)


def _near_ties() -> tuple[FrozenTarget, torch.Tensor]:
    """A map whose rows come in pairs that hardly differ, and states."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 64, generator=generator)
    lm_head = torch.cat([rows, rows + 1e-5 * torch.randn(50, 64, generator=generator)])
    return FrozenTarget(lm_head, lm_head), torch.randn(4000, 64, generator=generator)


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8"])
def test_near_ties_may_change_their_order_by_rounding(codec: str) -> None:
    frozen, hidden = _near_ties()
    own = frozen.logits(hidden)
    stored = decode(*encode(CODECS[codec], hidden, 1))
    flipped = int((frozen.logits(stored).argmax(-1) != own.argmax(-1)).sum())
    assert flipped > 20
    assert _compare(frozen, stored, own, codec) == 4000


def test_a_difference_that_rounding_cannot_make_is_found_at_one_position() -> None:
    frozen, hidden = _near_ties()
    own = frozen.logits(hidden)
    stored = hidden.bfloat16()
    stored[123] = stored[124]
    with pytest.raises(UserError, match=r"at 1 of 4000 label positions; first at row r, position 123"):
        _compare(frozen, stored, own, "bf16")
    for codec, finer in (("bf16", "fp32"), ("fp8", "bf16"), ("int8", "bf16")):  # too much for a finer one
        with pytest.raises(UserError, match=r"position \d+"):
            _compare(frozen, decode(*encode(CODECS[codec], hidden, 1)).float(), own, finer)
