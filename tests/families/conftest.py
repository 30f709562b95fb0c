"""A target of one family, its shards and a head trained on them, made once for all tests that ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from eagle_train.heads.disk import EagleHead
from eagle_train.targets.load import Target

from .models import family_config, save_target

PROMPT = [(37 * i + 5) % 290 for i in range(20)]  # longer than the families' windows


@dataclass(frozen=True)
class Trained:
    """What the commands leave behind."""

    target: Target
    shards: Path
    run: Path

    @property
    def head(self) -> EagleHead:
        """The run's best."""
        from eagle_train.heads.disk import load_head

        head = load_head(self.run / "best")
        assert isinstance(head, EagleHead)
        return head


def train_on(target_dir: Path, conversations: Path, folder: Path) -> Trained:
    """Prepare, extract in fp32 and train the tiny recipe for three steps."""
    from eagle_train.data.prepare import prepare
    from eagle_train.recipe_files import load_recipe
    from eagle_train.targets.extract import extract
    from eagle_train.targets.load import load_target
    from eagle_train.training.loop import train

    rows, shards, run = (folder / name for name in ("rows", "shards", "run"))
    prepare([str(conversations)], str(target_dir), rows)
    extract(rows, str(target_dir), shards, codec="fp32", dtype="fp32", device="cpu", show=False)
    steps = ["run.steps=3", "run.eval_every=3", "run.save_every=3", "loss.ttt_steps=2"]
    train(shards, load_recipe("eagle3-tiny", steps), run, show=False)
    return Trained(load_target(target_dir, dtype="fp32", device="cpu"), shards, run)


@pytest.fixture(scope="session")
def few_conversations(tmp_path_factory: pytest.TempPathFactory, tiny_conversations: Path) -> Path:
    """8 conversations, up to about a hundred tokens long."""
    file = tmp_path_factory.mktemp("few") / "few.jsonl"
    file.write_text("".join(tiny_conversations.read_text().splitlines(keepends=True)[:8]))
    return file


@pytest.fixture(scope="session")
def trained(
    tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, few_conversations: Path
) -> Callable[[str], Trained]:
    """trained(family): its target, shards and run."""

    @cache
    def make(family: str) -> Trained:
        folder = tmp_path_factory.mktemp(family)
        made = save_target(folder / "target", family_config(family), tiny_target_dir)
        return train_on(made, few_conversations, folder)

    return make
