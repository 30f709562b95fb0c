"""Predictions and answers on a pretend GPU are those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Dynamic
from eagle_train.evaluation.predict import predict
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head, save_head
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.regenerate import regenerate
from eagle_train.targets.load import load_target

from .pretend import pretend_cuda


@pytest.fixture(scope="module")
def heads(tiny_target_dir, tmp_path_factory) -> dict[str, str]:
    config, folders = load_target(tiny_target_dir, device="cpu").config.to_dict(), {}
    torch.manual_seed(0)
    for kind in ("eagle1", "eagle3", "medusa"):
        folders[kind] = str(tmp_path_factory.mktemp("heads") / kind)
        more: Any = {"medusa_heads": 2} if kind == "medusa" else {}
        save_head(build_head(HeadConfig.for_target(config, kind, **more)), folders[kind])
    return folders


def on_both(work: Any) -> tuple[Any, Any]:
    here = work()
    with pretend_cuda():
        return here, work()


def test_predictions_are_the_same(heads, tiny_shards_dir, tiny_rows_dir, tiny_target_dir):
    def work() -> Any:
        found = [
            predict(heads["eagle3"], tiny_shards_dir, rows=range(3), sampling=Sampling(1.0)),
            predict(
                heads["eagle3"], tiny_rows_dir, str(tiny_target_dir), rows=[1, 2], draft=Dynamic(8, 3, 2)
            ),
        ]
        return [one["tau"] for one in found]

    here, there = on_both(work)
    assert there == pytest.approx(here, abs=1e-4)


def test_answers_are_regenerated_alike(tiny_conversations: Path, tiny_target_dir, tmp_path):
    def work() -> Any:
        out = tmp_path / f"{torch.cuda.is_available()}.jsonl"
        settings = AnswerSettings(max_new_tokens=6)
        given: Any = {"settings": settings, "num_slots": 5, "dtype": "fp32", "show": False}
        assert regenerate([str(tiny_conversations)], tiny_target_dir, out, **given)["complete"]
        return out.read_text()

    here, there = on_both(work)
    assert here == there
