"""A head with a sliding window drafts as if every row were computed anew over the rows it may see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.reader import TargetReader
from eagle_train.decoding.sampling import SeededChance
from eagle_train.decoding.shapes import Chain, Dynamic
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.targets.load import load_target

_TEXT = [5, 17, 99, 3, 250, 41, 7, 120, 33, 64, 8, 201]  # 11 rows and the root
_WINDOW = 4


class Rows:
    """Every row's keys and values, and attention written out over those that a row may see."""

    def __init__(self, window: int) -> None:
        self.window, self.memory = window, {}

    def copy(self) -> Rows:
        other = Rows(self.window)
        other.memory = {layer: list(entries) for layer, entries in self.memory.items()}
        return other

    def attend(self, position: int):
        def attend(layer, q, k, v):
            entries = self.memory.setdefault(layer, [])
            entries.append((position, k[0], v[0]))
            seen = [entry for entry in entries if position - entry[0] < self.window]
            keys, values = (torch.stack([entry[i] for entry in seen]).repeat_interleave(2, 1) for i in (1, 2))
            weights = (torch.einsum("hd,khd->hk", q[0], keys) * q.shape[-1] ** -0.5).softmax(-1)
            return torch.einsum("hk,khd->hd", weights, values)[None]

        return attend


def naive_row(head, frozen, rows: Rows, hidden, token: int, position: int):
    """Run one row [1, H] with `token` beside it; return its output."""
    return head(hidden, frozen.embed(torch.tensor([token])), torch.tensor([position]), rows.attend(position))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("shape", [Chain(6), Dynamic(14, 3, 6)], ids=["chain", "dynamic"])
@torch.inference_mode()
def test_drafts_see_the_last_rows_alone(shape, kind, layers, tiny_target_dir: Path):
    target = load_target(str(tiny_target_dir), dtype="fp32", device="cpu")
    torch.manual_seed(1)
    config = HeadConfig.for_target(
        target.config.to_dict(), kind, num_hidden_layers=layers, sliding_window=_WINDOW
    )
    head, frozen = build_head(config), target.frozen()
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # so that attention bears on the guesses
    drafter = HeadDrafter(head, target, shape)
    with TargetReader(target, drafter.layer_ids) as reader:
        seen = reader.read(_TEXT[:-1])
        drafter.begin(SeededChance(0))
        drafter.observe(reader.rows(0, _TEXT, seen))
        tree = drafter.propose()
        hidden = head.start(seen.last if seen.aux is None else seen.aux)

    verified = Rows(_WINDOW)
    for t in range(len(_TEXT) - 1):
        out = naive_row(head, frozen, verified, hidden[t : t + 1], _TEXT[t + 1], t)
    states = {0: (verified, out)}  # node -> (rows up to it, its row's output)
    children: dict[int, list[int]] = {}
    for node in range(1, len(tree.tokens)):
        parent = tree.parents[node]
        rows, out = states[parent]
        best = head.logits(out[0], frozen).topk(1 if isinstance(shape, Chain) else 3).indices.tolist()
        assert int(tree.tokens[node]) in best
        children.setdefault(parent, []).append(tree.tokens[node])
        assert len(set(children[parent])) == len(children[parent])
        mine, depth = rows.copy(), len(_path(tree.parents, node))
        position = len(_TEXT) - 2 + depth
        states[node] = (
            mine,
            naive_row(head, frozen, mine, head.carry(out), int(tree.tokens[node]), position),
        )


def _path(parents: tuple[int, ...], node: int) -> list[int]:
    return [] if node == 0 else [*_path(parents, parents[node]), node]
