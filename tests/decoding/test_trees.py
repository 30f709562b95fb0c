"""Trees: shapes are checked, filled by rank, and a dynamic tree is the best of all nodes found."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_train.decoding.asking import answered
from eagle_train.decoding.trees import EAGLE1_PATHS, StaticShape, Tree, growing_dynamic, growing_static
from eagle_train.errors import UserError


class TableHead:
    """Stands in for a head: random logits for every path of draft ids, on a grid so that ties occur."""

    def __init__(self, vocab: int, seed: int, grid: float) -> None:
        self.vocab, self.seed, self.grid = vocab, seed, grid
        self.paths: list[tuple[int, ...]] = [()]  # of slot 0, 1, ..
        self.calls = 0

    def logits(self, path: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, path)) % 2**31)
        row = 8 * torch.rand(self.vocab, generator=generator)
        return (row / self.grid).round() * self.grid if self.grid else row

    def first(self) -> torch.Tensor:
        return self.logits(())

    def expand(self, draft_ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        earlier = len(self.paths)
        for token, slot in zip(draft_ids.tolist(), slots.tolist(), strict=True):
            assert slot < earlier
            self.paths.append((*self.paths[slot], token))
        return torch.stack([self.logits(path) for path in self.paths[earlier:]])


def grow_dynamic(logits, expand, **sizes):
    return answered(growing_dynamic(logits, **sizes), lambda rows: expand(*rows))


def grow_static(logits, expand, shape):
    return answered(growing_static(logits, shape), lambda rows: expand(*rows))


def paths_of(tokens: torch.Tensor, parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens.tolist(), parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def naive_dynamic(head: TableHead, top_k: int, depth: int) -> dict[tuple[int, ...], float]:
    """EAGLE-2's growth without shortcuts: every level expanded; all nodes found, with their scores."""
    first = head.first().log_softmax(-1)
    ids = first.topk(min(top_k, head.vocab)).indices.tolist()
    found = {(token,): float(first[token]) for token in ids}
    beams = list(found)
    for _ in range(1, depth):
        grown = {}
        for beam in beams:
            row = head.logits(beam).log_softmax(-1)
            for token in row.topk(min(top_k, head.vocab)).indices.tolist():
                grown[(*beam, token)] = found[beam] + float(row[token])
        found |= grown
        beams = sorted(grown, key=lambda path: -grown[path])[:top_k]
    return found


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    total=st.integers(2, 40),
    top_k=st.integers(1, 6),
    depth=st.integers(1, 5),
    grid=st.sampled_from([0.0, 0.0, 0.5, 100.0]),
)
def test_dynamic_tree_holds_the_best_nodes_parents_first(seed, total, top_k, depth, grid):
    head = TableHead(5, seed, grid)
    tokens, parents, scores = grow_dynamic(
        head.first(), head.expand, total_tokens=total, top_k=top_k, depth=depth
    )
    paths = paths_of(tokens, parents)
    found = naive_dynamic(head, top_k, depth)
    assert len(set(paths)) == len(paths) == min(total - 1, len(found))
    assert all(-1 < parent < node for node, parent in enumerate(parents[1:], start=1))
    for path, score in zip(paths, scores.tolist(), strict=True):
        rows = (head.logits(path[:i]).log_softmax(-1)[token] for i, token in enumerate(path))
        assert score == pytest.approx(float(sum(rows)), abs=1e-4)
    if grid == 0:  # without ties the nodes found are the same ones
        best = sorted(found, key=lambda path: -found[path])[: len(paths)]
        assert sorted(paths) == sorted(best)


def test_growing_stops_when_no_frontier_node_can_enter():
    head = TableHead(50, 0, 0.0)
    grow_dynamic(head.first() / 10, head.expand, total_tokens=6, top_k=5, depth=8)
    assert head.calls < 7
    calls = []

    def sure(draft_ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        calls.append(len(draft_ids))
        return torch.zeros(len(draft_ids), 50).index_fill(1, torch.tensor([7]), 12.0)

    grow_dynamic(sure(torch.zeros(1), torch.zeros(1))[0], sure, total_tokens=60, top_k=5, depth=8)
    assert calls == [1, *[5] * 7]


def test_a_certain_head_gives_a_chain_in_order_although_all_scores_tie():
    """Every child of probability 1 scores as its parent does: parents must still come first."""

    def certain(draft_ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return torch.full((len(draft_ids), 4), -1e4).index_fill(1, torch.tensor([2]), 0.0)

    first = certain(torch.zeros(1), torch.zeros(1))[0]
    tokens, parents, _ = grow_dynamic(first, certain, total_tokens=5, top_k=3, depth=6)
    assert tokens.tolist() == [2, 2, 2, 2]
    assert parents == (-1, 0, 1, 2, 3)


def test_a_frontier_node_barely_better_than_the_worst_kept_is_still_expanded():
    def sure(draft_ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.9, 0.05, 0.05]]).log().repeat(len(draft_ids), 1)

    first = torch.tensor([0.5, 0.46, 0.04]).log()  # the best child, 0.5 * 0.9, stays below the second
    tokens, parents, _ = grow_dynamic(first, sure, total_tokens=3, top_k=2, depth=2)
    assert (tokens.tolist(), parents) == ([0, 1], (-1, 0, 0))
    first = torch.tensor([0.5, 0.44, 0.06]).log()  # here it comes above
    tokens, parents, _ = grow_dynamic(first, sure, total_tokens=3, top_k=2, depth=2)
    assert (tokens.tolist(), parents) == ([0, 0], (-1, 0, 1))


def test_a_tie_at_the_cut_keeps_the_parent():
    """Two first guesses of probability .9 and .1, each with a certain child: the third place is a tie."""

    def certain(draft_ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return torch.full((len(draft_ids), 3), -1e4).index_fill(1, torch.tensor([1]), 0.0)

    first = torch.tensor([0.9, 0.1, 0.0]).log()
    tokens, parents, _ = grow_dynamic(first, certain, total_tokens=4, top_k=2, depth=2)
    assert tokens.tolist() == [0, 1, 1]
    assert parents == (-1, 0, 0, 1)


def test_a_top_k_above_the_draft_vocabulary_gives_every_node_all_children():
    head = TableHead(3, 0, 0.0)
    tokens, _, _ = grow_dynamic(head.first(), head.expand, total_tokens=60, top_k=10, depth=3)
    assert len(tokens) == 3 + 9 + 27


@pytest.mark.parametrize("paths", [EAGLE1_PATHS, [(0,)], [(0,), (0, 3), (1,), (1, 0), (0, 3, 2)]])
def test_static_tree_is_filled_by_rank(paths):
    head, shape = TableHead(12, 1, 0.0), StaticShape.from_paths(paths)
    tokens, parents = grow_static(head.first(), head.expand, shape)
    wanted = []
    for ranks in sorted(map(tuple, paths), key=lambda path: (len(path), path)):
        path: tuple[int, ...] = ()
        for rank in ranks:
            path = (*path, int(head.logits(path).topk(rank + 1).indices[rank]))
        wanted.append(path)
    assert paths_of(tokens, parents) == wanted
    inner = {path[:-1] for path in map(tuple, paths)} - {()}
    assert len(head.paths) - 1 == len(inner)  # leaves cost no row of the head


def test_a_chain_is_the_static_tree_of_best_guesses():
    assert StaticShape.chain(3) == StaticShape.from_paths([(0,), (0, 0), (0, 0, 0)])


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([], "no paths"),
        ([(0,), (0,)], "twice"),
        ([(0,), (1, 0)], r"path \[1, 0\] has no parent \[1\]"),
        ([(-1,)], "has no parent"),
    ],
)
def test_impossible_static_trees_are_refused(paths, words):
    with pytest.raises(UserError, match=words):
        StaticShape.from_paths(paths)


def test_a_static_tree_of_more_ranks_than_the_draft_vocabulary_is_refused():
    head = TableHead(3, 0, 0.0)
    with pytest.raises(UserError, match="got 3 draft tokens, wanted 4"):
        grow_static(head.first(), head.expand, StaticShape.from_paths(EAGLE1_PATHS))


def test_a_node_sees_itself_and_its_ancestors():
    tree = Tree((7, 1, 2, 3, 4), (-1, 0, 0, 1, 3))
    assert tree.depths == (0, 1, 1, 2, 3)
    assert tree.children == ((1, 2), (3,), (), (4,), ())
    assert [row.nonzero().flatten().tolist() for row in tree.sees] == [
        [0],
        [0, 1],
        [0, 2],
        [0, 1, 3],
        [0, 1, 3, 4],
    ]
