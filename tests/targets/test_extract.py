"""Every value in a shard is the model's own, in the layers and at the positions asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle_train.shards.reader import open_shards
from eagle_train.targets.load import load_target

from .small import Run, bytes_of


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp8", "int8"])
def test_every_value_is_the_models_own(run: Run, tmp_path: Path, tiny_target_dir: Path, codec: str) -> None:
    run(features="all", codec=codec)
    shards = open_shards(tmp_path / "out")
    model = load_target(tiny_target_dir, device="cpu").model
    for i in range(shards.num_rows):
        row = shards.read(i)
        with torch.no_grad():  # alone, without padding
            own = model(input_ids=row.input_ids[None], output_hidden_states=True)
        aux = torch.cat([own.hidden_states[k][0] for k in (2, 4, 5)], dim=-1)
        assert row.aux is not None
        assert row.last_all is not None
        for stored, want, layers in ((row.aux, aux, 3), (row.last_all, own.hidden_states[-1][0], 1)):
            assert stored.dtype == (torch.bfloat16 if codec == "bf16" else torch.float32)
            largest = want.abs().unflatten(1, (layers, -1)).amax(-1, keepdim=True).expand(-1, -1, 32)
            absolute = {"fp8": largest * 2**-18, "int8": largest / 250}.get(codec, 0 * largest)
            relative = {"bf16": 2**-8, "fp8": 2**-4}.get(codec, 0.0)
            most = 1e-4 + 1e-4 * want.abs() + relative * want.abs() + absolute.flatten(1)
            assert bool(((stored.float() - want).abs() <= most).all())
        positions = [t for s, e in row.spans for t in range(s - 1, e)]
        logits = own.logits[0, positions]
        torch.testing.assert_close(row.label_lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        assert torch.equal(row.label_argmax, logits.argmax(-1))


def test_states_encoded_piece_by_piece_are_the_same(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_train.shards import writer

    run("at-once", codec="fp8", features="all")
    monkeypatch.setattr(writer, "_PIECE", 7)
    run("in-pieces", codec="fp8", features="all")
    assert bytes_of(tmp_path / "in-pieces") == bytes_of(tmp_path / "at-once")


def test_the_first_and_last_label_positions_of_each_answer(
    run: Run, tmp_path: Path, tiny_target_dir: Path
) -> None:
    run(codec="fp32")
    shards = open_shards(tmp_path / "out")
    target = load_target(tiny_target_dir, device="cpu")
    row = next(shards.read(i) for i in range(shards.num_rows) if len(shards.spans[i]) == 2)
    with torch.no_grad():
        own = target.model(input_ids=row.input_ids[None], output_hidden_states=True)
    (s0, e0), (s1, e1) = row.spans
    assert row.input_ids[e0] == row.input_ids[e1] == target.eos_ids[0]  # the end-of-turn token is supervised
    first_of_second = e0 - s0 + 1
    for label, position in ((0, s0 - 1), (e0 - s0, e0 - 1), (first_of_second, s1 - 1), (-1, e1 - 1)):
        torch.testing.assert_close(
            row.label_last[label], own.hidden_states[-1][0, position], rtol=1e-4, atol=1e-4
        )
        assert row.label_argmax[label] == own.logits[0, position].argmax()


def test_other_layers_are_stored_when_asked_for(run: Run, tmp_path: Path, tiny_target_dir: Path) -> None:
    run(codec="fp32", layer_ids=(0, 7))
    shards = open_shards(tmp_path / "out")
    assert shards.info["layer_ids"] == [0, 7]
    row = shards.read(0)
    with torch.no_grad():
        own = load_target(tiny_target_dir, device="cpu").model(
            input_ids=row.input_ids[None], output_hidden_states=True
        )
    want = torch.cat([own.hidden_states[k][0] for k in (0, 7)], dim=-1)
    torch.testing.assert_close(row.aux, want, rtol=1e-4, atol=1e-4)


def test_medusa_shards_hold_label_states_only(run: Run, tmp_path: Path) -> None:
    run(features="medusa", codec="fp32")
    row = open_shards(tmp_path / "out").read(0)
    assert row.aux is None
    assert row.last_all is None
    assert len(row.label_last) == len(row.label_argmax) > 0


def test_no_shard_holds_padding(run: Run, tmp_path: Path, tiny_rows_dir: Path) -> None:
    summary = run()
    info = json.loads((tiny_rows_dir / "rows.json").read_text())
    assert summary["tokens"] == info["tokens"]
    assert summary["labels"] == info["supervised_tokens"]
    assert summary["rows"] == info["rows"]
