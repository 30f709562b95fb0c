"""Trees and greedy acceptance equal to the figures in tests/golden/A."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle_train.decoding.asking import answered
from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.reader import Rows
from eagle_train.decoding.sampling import SeededChance
from eagle_train.decoding.shapes import Dynamic, Static
from eagle_train.decoding.trees import EAGLE1_PATHS, StaticShape, Tree, growing_dynamic
from eagle_train.decoding.verify import verify_greedy
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.shards.frozen_target import FrozenTarget

FOLDER = Path(__file__).parent / "A"


class StandIn:
    """What a drafter asks of a target, without a target."""

    name, device, dtype, num_layers = "golden", torch.device("cpu"), torch.float32, 8

    def __init__(self, frozen: FrozenTarget) -> None:
        self.frozen = lambda: frozen
        self.embedding = frozen.embedding
        self.vocab_size, self.hidden_size = frozen.vocab_size, frozen.hidden_size


class Case:
    """A golden drafting case: its tensors, and a drafter with its head."""

    def __init__(self, name: str, kind: str, shape: Static | Dynamic) -> None:
        self.tensors = load_file(FOLDER / f"{name}.safetensors")
        self.facts = json.loads((FOLDER / f"{name}.json").read_text())
        embedding = self.tensors["embed_tokens.weight"]
        frozen = FrozenTarget(embedding, self.tensors.get("input.target_lm_head.weight", embedding))
        weights = {k.removeprefix("weight."): v for k, v in self.tensors.items() if k.startswith("weight.")}
        d2t = weights.pop("d2t", None)
        in_draft = weights.pop("t2d", None)
        draft_ids = None if d2t is None else d2t + torch.arange(len(d2t))
        sizes = {k: v for k, v in self.facts["config"].items() if k != "draft_vocab_size"}
        rope = {"rope_theta": 10000.0, "rope_type": "default"}
        config = HeadConfig.for_target(
            {**sizes, "num_hidden_layers": 8, "rope_parameters": rope},
            kind,
            draft_vocab_size=None if d2t is None else len(d2t),
        )
        head = build_head(config, draft_ids)
        if in_draft is not None:
            assert torch.equal(head.in_draft, in_draft.bool())
        missing = head.load_state_dict(weights, strict=False)
        assert not missing.unexpected_keys
        assert set(missing.missing_keys) <= {"draft_ids", "in_draft"}
        self.drafter = HeadDrafter(head, StandIn(frozen), shape)  # type: ignore[arg-type]
        self.drafter.begin(SeededChance(0))

    def observe(self, start: int, ids: str, features: str) -> None:
        hidden = self.tensors[features][0]
        tokens = self.tensors[ids][0][start : start + len(hidden) + 1]
        self.drafter.observe(Rows(start, tokens, hidden, hidden))


def retrieve(tree: Tree) -> Tensor:
    """The reference's list of root-to-leaf paths, padded with -1, in lexicographic order, padding last."""
    paths = []
    for leaf in (node for node in range(len(tree)) if not tree.children[node]):
        path = [leaf]
        while path[0]:
            path.insert(0, tree.parents[path[0]])
        paths.append(path)
    longest = max(map(len, paths))
    padded = sorted(path + [len(tree)] * (longest - len(path)) for path in paths)
    table = torch.tensor(padded)
    return table.masked_fill(table == len(tree), -1)


def assert_same_tree(tree: Tree, golden: dict[str, Tensor], prefix: str, order: str | None = None) -> None:
    assert list(tree.tokens) == golden[f"{prefix}.draft_tokens"][0].tolist()
    assert list(tree.depths) == golden[f"{prefix}.tree_position_ids"].tolist()
    assert torch.equal(tree.sees.float(), golden[f"{prefix}.tree_mask"][0, 0])
    wanted = golden[f"{order or prefix}.retrieve_indices"]
    assert sorted(retrieve(tree).tolist()) == sorted(wanted.tolist())
    if order:
        assert torch.equal(retrieve(tree), wanted)


# The reference's depth counts the expansions after the first level; ours counts levels.
GROWN = Dynamic(total_tokens=16, top_k=4, depth=5)


def test_dynamic_tree_of_an_eagle3_head_in_two_rounds():
    case = Case("dynamic_tree", "eagle3", GROWN)
    assert (case.facts["total_tokens"], case.facts["top_k"], case.facts["depth"]) == (16, 4, 4)
    case.observe(0, "input.input_ids", "input.hidden_states")
    assert_same_tree(case.drafter.propose(), case.tensors, "greedy", order="sampling")
    case.observe(12, "input2.input_ids", "input2.hidden_states")
    assert_same_tree(case.drafter.propose(), case.tensors, "round2")


def test_dynamic_tree_of_an_eagle1_head():
    case = Case("eagle1_draft", "eagle1", GROWN)
    case.observe(0, "input.input_ids", "input.hidden_states")
    assert_same_tree(case.drafter.propose(), case.tensors, "dynamic")


@pytest.mark.parametrize(
    ("name", "kind", "prefix"), [("dynamic_tree", "eagle3", "greedy"), ("eagle1_draft", "eagle1", "dynamic")]
)
def test_dynamic_tree_scores(name, kind, prefix):
    case = Case(name, kind, GROWN)
    case.observe(0, "input.input_ids", "input.hidden_states")
    drafter = case.drafter
    first = drafter.head.logits(drafter._outs[0], drafter.frozen)
    growing = growing_dynamic(first, total_tokens=16, top_k=4, depth=5)
    _, _, scores = answered(growing, lambda rows: drafter.expand(*rows))
    torch.testing.assert_close(scores, case.tensors[f"{prefix}.node_scores"], atol=1e-4, rtol=0)


def test_static_tree_of_an_eagle1_head():
    case = Case("eagle1_draft", "eagle1", Static())
    case.observe(0, "input.input_ids", "input.hidden_states")
    tree = case.drafter.propose()
    assert list(tree.tokens) == case.tensors["static.tree_tokens"][0].tolist()
    table = retrieve(tree)
    tokens = torch.tensor(tree.tokens)[table].masked_fill(table < 0, -1)
    assert torch.equal(tokens, case.tensors["static.candidates"])


@pytest.mark.parametrize("name", ["mc_sim_7b_63", "small"])
def test_static_tree_buffers(name):
    golden = load_file(FOLDER / "static_tree.safetensors")
    paths = json.loads((FOLDER / "static_tree.json").read_text())["trees"][name]
    if name == "mc_sim_7b_63":
        assert [list(path) for path in EAGLE1_PATHS] == paths
    shape = StaticShape.from_paths(paths)
    tree = Tree((0,) * len(shape.parents), shape.parents)
    assert torch.equal(tree.sees.float(), golden[f"{name}.tree_attn_mask"][0, 0])
    assert list(tree.depths) == list(shape.depths) == golden[f"{name}.tree_position_ids"].tolist()
    assert torch.equal(retrieve(tree), golden[f"{name}.retrieve_indices"])
    # The reference stores 10 ranked tokens per expanded node: the index of a node names its parent and rank.
    inner = sorted(set(shape.parents[1:]))
    indices = [0] + [
        1 + 10 * inner.index(parent) + rank
        for parent, rank in zip(shape.parents[1:], shape.ranks[1:], strict=True)
    ]
    assert indices == golden[f"{name}.tree_indices"].tolist()


CASES = json.loads((FOLDER / "posterior.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES)
def test_greedy_acceptance(case):
    golden = load_file(FOLDER / "posterior.safetensors")
    tree = Tree(tuple(golden["tree.tokens"].tolist()), tuple(golden["tree.parents"].tolist()))
    best = golden[f"{case}.node_logits"].argmax(-1).tolist()
    path, token = verify_greedy(tree, lambda node: best[node])
    assert [0, *path] == golden[f"{case}.accepted_nodes"].tolist()
    assert len(path) == int(golden[f"{case}.accept_length"])
    assert token == int(golden[f"{case}.next_token"])
