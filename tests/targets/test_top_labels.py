"""Top labels on disk: the target's own likeliest tokens, sizes as planned, one kind in a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_cli.main import main
from eagle_train.errors import UserError
from eagle_train.shards import upkeep
from eagle_train.shards.listing import read_manifest
from eagle_train.shards.reader import open_shards
from eagle_train.shards.schema import MANIFEST
from eagle_train.targets.labels import likeliest
from eagle_train.targets.load import load_target
from eagle_train.targets.survey import survey

from .small import Run, bytes_of, shards_in


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_they_are_the_models_own(run: Run, tmp_path: Path, tiny_target_dir: Path, codec: str) -> None:
    made = run(codec=codec, label_top_k=5)
    target, shards = load_target(tiny_target_dir, dtype="fp32", device="cpu"), open_shards(tmp_path / "out")
    kept = 0.0
    for number in range(shards.num_rows):
        row = shards.read(number)
        with torch.no_grad():
            logits = target.model(row.input_ids[None]).logits[0]
        at = torch.cat([torch.arange(s - 1, e) for s, e in row.spans])
        law = logits[at].log_softmax(-1)
        assert row.label_ids is not None
        assert row.label_logp is not None
        assert torch.equal(row.label_ids[:, 0].long(), row.label_argmax)
        wanted = law.topk(5).values
        bits = 1e-4 if codec == "fp32" else 2e-3
        torch.testing.assert_close(row.label_logp.float(), wanted, rtol=bits, atol=bits)
        torch.testing.assert_close(law.gather(-1, row.label_ids.long()), wanted, rtol=1e-4, atol=1e-4)
        kept += float(wanted.exp().sum())
    assert made["label_mass"] == pytest.approx(kept / made["labels"], rel=1e-3)


def test_the_argmax_comes_first_among_equals() -> None:
    logits = torch.zeros(2, 300)
    logits[1, [7, 9]] = 1.0
    for first in ([0, 7], [17, 9]):  # whichever of the equal ones is named
        assert likeliest(logits, torch.tensor(first), 1).tolist() == [[first[0]], [first[1]]]
        assert set(likeliest(logits, torch.tensor(first), 2)[1].tolist()) == {7, 9}


def test_sizes_are_those_planned_and_smaller_by_the_states(
    run: Run, tmp_path: Path, tiny_rows_dir: Path, tiny_target_dir: Path
) -> None:
    size = {}
    for k in (0, 4):
        run(f"top{k}", codec="bf16", label_top_k=k)
        size[k] = sum(file.stat().st_size for file in (tmp_path / f"top{k}").iterdir())
        given = {"codec": "bf16", "label_top_k": k, "dtype": "fp32", "device": "cpu"}
        work = survey(tiny_rows_dir, str(tiny_target_dir), None, batch_tokens=256, shard_tokens=512, **given)
        assert work.directory_size("bf16") == pytest.approx(size[k], rel=0.02)
    saved = read_manifest(tmp_path / "top0")["labels"] * (2 * 32 - 4 * (4 + 2))
    assert size[0] - size[4] == pytest.approx(saved, rel=0.1)


def test_they_are_resumed_verified_split_and_merged_with_their_like_alone(run: Run, tmp_path: Path) -> None:
    run(label_top_k=4)
    before = bytes_of(tmp_path / "out")
    (tmp_path / "out" / shards_in(tmp_path / "out")[1]).unlink()
    assert run(label_top_k=4)["shards_done_here"] == 1
    assert bytes_of(tmp_path / "out") == before
    assert upkeep.verify(tmp_path / "out", show=False)["faults"] == []
    for k in (0, 5):
        with pytest.raises(UserError, match=f"with label top k 4; this run has {k}"):
            run(label_top_k=k)
    upkeep.split(tmp_path / "out", tmp_path / "parts", 2, show=False)
    halves = [tmp_path / "parts" / f"part-{n}" for n in range(2)]
    assert (
        upkeep.merge(halves, tmp_path / "whole", show=False)["labels"]
        == read_manifest(tmp_path / "out")["labels"]
    )
    run("states")
    with pytest.raises(UserError, match=r"label top k 0, .* has 4"):
        upkeep.merge([halves[0], tmp_path / "states"], tmp_path / "mixed", show=False)


def test_shards_info_verify_and_merge_say_how_labels_are_held(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mass = run(label_top_k=4)["label_mass"]
    upkeep.split(tmp_path / "out", tmp_path / "parts", 2, show=False)
    parts = [str(tmp_path / "parts" / f"part-{n}") for n in range(2)]
    words = f", the 4 likeliest tokens of each label ({mass:.2%} of its probability), codec bf16"
    for asked in (["info", tmp_path / "out"], ["verify", tmp_path / "out"], ["merge", *parts]):
        more = ["--out", tmp_path / "merged"] if asked[0] == "merge" else []
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(["shards", *map(str, [*asked, *more])])
        assert not left.value.code
        assert words in capsys.readouterr().out
    (tmp_path / "out" / MANIFEST).unlink()  # of an extraction under way the setting alone is known
    assert (upkeep.describe(tmp_path / "out")["label_top_k"], run("states")["label_top_k"]) == (4, None)


def test_what_cannot_do_without_the_states_is_refused(run: Run, tmp_path: Path) -> None:
    for features in ("eagle1", "medusa", "all"):
        with pytest.raises(UserError, match=f"--label-top-k 4: --for {features} keeps the last states"):
            run(features=features, label_top_k=4)
    with pytest.raises(UserError, match="--label-top-k 301: the target has 300 tokens"):
        run(label_top_k=301)
    assert not (tmp_path / "out").exists()
