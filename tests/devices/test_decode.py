"""Decoding, predictions, tuning and answers on pretend GPUs are those of the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Chain, Dynamic, Sampled, Static
from eagle_train.evaluation.assurance import verify_head
from eagle_train.evaluation.evaluate import evaluate
from eagle_train.evaluation.live import answer_live
from eagle_train.evaluation.methods import Method, Sizes
from eagle_train.evaluation.predict import predict
from eagle_train.evaluation.questions import Question
from eagle_train.evaluation.tuning import tune
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head, save_head
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.decode import Job, decode
from eagle_train.regenerate.regenerate import regenerate
from eagle_train.targets.load import load_target

from .pretend import pretend_cuda

QUESTIONS = [Question("a", "", ("Why is the sea deep? deep? deep?",)), Question("b", "", ("Bake!",))]
OWN = {  # processors of every kind
    "sequence_bias": [[[9], -2.0]],
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[7]],
    "min_new_tokens": 2,
    "exponential_decay_length_penalty": [3, 1.2],
    "suppress_tokens": [11],
    "begin_suppress_tokens": [12],
    "min_p": 0.001,
    "typical_p": 0.99,
    "epsilon_cutoff": 1e-4,
    "eta_cutoff": 1e-4,
}
SAMPLED = Sampling(0.9, top_k=40, top_p=0.95, repetition_penalty=1.1)
FEW: Any = {"max_new_tokens": 3, "dtype": "fp32", "show": False}
STATIC = Static(((0,), (1,), (0, 0)))


@pytest.fixture(scope="module")
def target_dir(make_tiny_target, tmp_path_factory) -> Path:
    """A target of three layers, with processors of its own and an lm_head that is not the embedding."""
    folder = make_tiny_target(tmp_path_factory.mktemp("target") / "own", num_layers=3, tied=False)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **OWN}))
    return folder


@pytest.fixture(scope="module")
def heads(tiny_target_dir, target_dir, tmp_path_factory) -> dict[str, str]:
    """Heads for `target_dir`, and `tiny`, an EAGLE-3 one for the target of eight layers."""
    folders: dict[str, str] = {}
    torch.manual_seed(0)
    for name in ("eagle1", "eagle3", "medusa", "tiny"):
        config = load_target(tiny_target_dir if name == "tiny" else target_dir, device="cpu").config.to_dict()
        more: Any = {"medusa": {"medusa_heads": 2}, "eagle3": {"feature_layers": (0, 1, 2)}}.get(name, {})
        kind = "eagle3" if name == "tiny" else name
        folders[name] = str(tmp_path_factory.mktemp("heads") / name)
        save_head(build_head(HeadConfig.for_target(config, kind, **more)), folders[name])
    return folders


def course(report: dict[str, Any]) -> list[tuple]:
    """Tokens and rounds of every way of decoding, and whether the ids are plain decoding's."""
    assert all(one["rounds"] for one in report["results"])
    return [(one["method"], one["rounds"], one["tokens"], one["lossless"]) for one in report["results"]]


def on_both(work: Any, count: int = 1) -> tuple[Any, Any]:
    if torch.cuda.is_available():
        pytest.skip("this machine has the true thing")
    here = work()
    with pretend_cuda(count):
        return here, work()


@pytest.mark.parametrize(
    ("sampling", "batch", "shapes", "names"),
    [
        (
            Sampling(),
            1,
            [STATIC, Dynamic(8, 3, 2)],
            ["lookahead", "prompt-lookup", "draft-model=first:1", "medusa"],
        ),
        (SAMPLED, 2, [Chain(2), Sampled((2, 1))], ["draft-model=", "eagle1"]),
    ],
)
def test_every_method_writes_on_a_gpu_what_it_writes_on_the_cpu(
    sampling, batch, shapes, names, heads, target_dir
):
    """Greedy and alone; sampled after the target's own processors, in a batch, a chain as a whole."""
    sources = {**heads, "draft-model=": target_dir}
    methods = [
        Method.parse(f"{name.strip('=')}={sources[name]}" if name in sources else name) for name in names
    ]
    given: Any = {**FEW, "sampling": sampling, "batch": batch, "processors": not sampling.greedy}
    sizes = Sizes(gamma=2, window=3, level=3, guesses=2)

    def work() -> Any:
        asked, target = QUESTIONS[:batch], load_target(target_dir, dtype="fp32")
        its = evaluate(heads["eagle3"], target, asked, shapes, block=True, **given)
        return course(its) + course(evaluate(None, target, asked, methods=methods, sizes=sizes, **given))

    here, there = on_both(work)
    assert here == there
    assert {one[-1] for one in there} == {True if sampling.greedy else None}


def test_a_target_spread_over_gpus_decodes_as_on_the_cpu(spread, heads, target_dir):
    methods = [Method.parse(text) for text in (f"medusa={heads['medusa']}", "draft-model=first:1")]
    shapes = [Chain(2), Sampled((2, 1)), Dynamic(8, 3, 2)]
    sampled: Any = {**FEW, "sampling": Sampling(1.0, top_k=40), "batch": 2, "block": True}
    jobs = [Job(i, list(range(20, 25 + 3 * i)), 3, i) for i in range(3)]

    def work() -> Any:
        place: Any = {"device_map": spread(3)} if torch.cuda.is_available() else {"device": "cpu"}
        target = load_target(target_dir, dtype="fp32", **place)
        places.append((str(target.device), str(target.lm_head.weight.device)))
        its = evaluate(heads["eagle3"], target, QUESTIONS, shapes, processors=False, **sampled)
        others = evaluate(None, target, QUESTIONS[:1], [STATIC], methods=methods, processors=False, **FEW)
        law = AnswerSettings(temperature=0.8)
        answers = {made.number: made.ids for made in decode(target, jobs, law, target.eos_ids, 2)}
        return course(its), course(others), answers

    places: list[tuple[str, str]] = []
    here, there = on_both(work, 2)
    assert places == [("cpu", "cpu"), ("cuda:0", "cuda:1")]
    assert here == there


def test_tuning_verifying_and_a_live_answer_run_on_a_gpu(gpu, heads, target_dir, monkeypatch, capsys):
    sizes = {"machine": {"PASSES": 2, "SIZES": (1, 2, 8), "OUTPUTS": (1, 2, 8), "ROWS": (1, 4)}}
    sizes["tuning"] = {"TREE_DEPTH": 3, "TOP_KS": (4,), "_BUDGETS": (3, 7)}
    for module, names in sizes.items():
        for name, fewer in names.items():
            monkeypatch.setattr(f"eagle_train.evaluation.{module}.{name}", fewer)
    head, target, few = heads["eagle3"], str(target_dir), {"max_new_tokens": 3, "show": False}
    assert tune(head, target, num_questions=2, sampling=Sampling(1.0), **few)["device"] == "cuda:0"
    checked = verify_head(
        head, target, drafts=[Chain(2)], num_questions=1, max_turns=1, dtypes=["bf16"], **few
    )
    assert checked["unexplained"] == []
    made = answer_live(head, target, "Why?", Dynamic(8, 3, 2), max_new_tokens=3)
    assert 1 <= len(made.ids) <= 3


def test_predictions_are_the_same(heads, tiny_shards_dir, tiny_conversations, tiny_target_dir):
    texts, target = tiny_conversations, str(tiny_target_dir)

    def work() -> Any:
        found = [
            predict(heads["tiny"], tiny_shards_dir, rows=range(3), sampling=Sampling(1.0)),
            predict(heads["tiny"], texts, target, rows=[1, 2], draft=Dynamic(8, 3, 2)),
        ]
        return [one["tau"] for one in found]

    here, there = on_both(work)
    assert there == pytest.approx(here, abs=1e-4)


def test_answers_are_regenerated_alike(tiny_conversations: Path, tiny_target_dir, tmp_path):
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(tiny_conversations.read_text().splitlines(keepends=True)[:4]))

    def work() -> Any:
        out = tmp_path / f"{torch.cuda.is_available()}.jsonl"
        settings = AnswerSettings(max_new_tokens=6)
        given: Any = {"settings": settings, "num_slots": 2, "dtype": "fp32", "show": False}
        assert regenerate([str(chats)], tiny_target_dir, out, **given)["complete"]
        return out.read_text()

    here, there = on_both(work)
    assert here == there
