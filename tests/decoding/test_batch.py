"""Several prompts at once: each answer, and each round, is what it is alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from eagle_train.decoding import batch as module
from eagle_train.decoding.batch import Job, generate_together
from eagle_train.decoding.batch_cache import BatchCache
from eagle_train.decoding.cache import TargetCache
from eagle_train.decoding.draft_model import DraftModel, first_layers
from eagle_train.decoding.drafters import Drafter, HeadDrafter
from eagle_train.decoding.law import MOST_AT_ONCE
from eagle_train.decoding.lookahead import Lookahead
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.medusa import MedusaDrafter
from eagle_train.decoding.prompt_lookup import PromptLookup
from eagle_train.decoding.sampling import Sampling, SeededChance
from eagle_train.decoding.shapes import Chain, Dynamic, Sampled, Static
from eagle_train.decoding.trees import EAGLE1_PATHS, StaticShape
from eagle_train.errors import UserError
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.targets.load import Target, load_target

from .test_loop import Scripted, small_head

LENGTHS = (3, 21, 1, 34, 9)
PROMPTS = [[(37 * i + 5 * k) % 290 for i in range(length)] for k, length in enumerate(LENGTHS)]
SCRIPTED = {"chain": StaticShape.chain(3), "tree": StaticShape.from_paths(EAGLE1_PATHS)}
SAMPLED = Sampling(0.8, top_k=40, top_p=0.95)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="fp32", device="cpu")


def jobs(make: Callable[[int], Drafter | None]) -> list[Job]:
    return [Job(prompt, make(number), SeededChance(number)) for number, prompt in enumerate(PROMPTS)]


def alone(target: Target, make: Callable[[int], Drafter | None], settings: Settings) -> list:
    made = []
    for number, prompt in enumerate(PROMPTS):
        drafter, chance = make(number), SeededChance(number)
        if drafter is None:
            made.append(plain(target, prompt, settings, chance=chance))
        else:
            made.append(generate(target, drafter, prompt, settings, chance=chance))
    return made


def rounds(made: Sequence) -> list:
    return [(one.ids, one.accepted, one.accepted_uncut, one.ended) for one in made]


def eos_of(target: Target) -> tuple[int, ...]:
    """A token that ends some answers early, at different places, and others never."""
    texts = [one.ids for one in alone(target, lambda number: None, Settings(max_new_tokens=20, eos_ids=()))]
    places = {token: [ids.index(token) for ids in texts if token in ids] for ids in texts for token in ids}
    return (max(places, key=lambda token: len(set(places[token])) * (len(places[token]) < len(texts))),)


@pytest.mark.parametrize(("name", "size"), [("chain", 1), ("chain", 3), ("chain", 8), ("tree", 3)])
def test_ragged_prompts_with_ragged_acceptance_are_answered_as_alone(target, name, size):
    eos, shape = eos_of(target), SCRIPTED[name]
    settings = Settings(max_new_tokens=20, eos_ids=eos, prefill_chunk=8)
    wanted = alone(target, lambda number: None, settings)
    assert len({len(one.ids) for one in wanted}) > 2
    right = ([True], [False], [True, False, False], [False, True], [True, True, False], [False] * 5)

    def scripted(number: int) -> Scripted:
        return Scripted([*PROMPTS[number], *wanted[number].ids], shape, right[number % len(right)])

    heard: list[int] = []
    got = generate_together(
        target, jobs(scripted), settings, size, on_tokens=lambda tokens, _: heard.extend(tokens)
    )
    assert rounds(got) == rounds(alone(target, scripted, settings))
    assert [one.ids for one in got] == [one.ids for one in wanted]
    assert sorted(heard) == sorted(token for one in got for token in one.ids)
    assert all(one.prefill_seconds > 0 and one.decode_seconds >= 0 for one in got)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, Sampling(repetition_penalty=1.3)])
def test_plain_decoding_together_is_plain_decoding_alone(target, sampling):
    settings = Settings(max_new_tokens=12, sampling=sampling, eos_ids=eos_of(target))
    nobody = lambda number: None  # noqa: E731
    got = generate_together(target, jobs(nobody), settings, 4)
    assert rounds(got) == rounds(alone(target, nobody, settings))
    assert not any(one.accepted for one in got)


PENALISED = Sampling(0.7, repetition_penalty=1.4)
CASES = [
    ("eagle1", Chain(3), Sampling(), False),
    ("eagle1", Static(), Sampling(), False),
    ("eagle3", Dynamic(12, 4, 4), Sampling(), False),
    ("eagle3", Chain(4, 0.02), Sampling(), False),
    ("eagle1", Chain(3), SAMPLED, False),
    ("eagle1", Chain(3), SAMPLED, True),
    ("eagle1", Sampled((2, 1)), SAMPLED, False),
    ("eagle3", Dynamic(12, 4, 4), SAMPLED, False),
    ("eagle1", Sampled((2, 1)), PENALISED, False),
]


@pytest.mark.parametrize(("kind", "shape", "sampling", "block"), CASES)
def test_heads_draft_and_draw_together_as_alone(target, kind, shape, sampling, block):
    head = small_head(target, kind, num_hidden_layers=2)
    settings = Settings(max_new_tokens=10, sampling=sampling, block=block)
    drafters = [[Noted(head, target, shape, sampling) for _ in PROMPTS] for _ in range(2)]
    got = generate_together(target, jobs(lambda number: drafters[0][number]), settings, 3)
    assert rounds(got) == rounds(alone(target, lambda number: drafters[1][number], settings))
    together, by_itself = ([drafter.guessed for drafter in some] for some in drafters)
    assert together == by_itself


class Noted(HeadDrafter):
    """Remembers what it guessed."""

    def begin(self, chance) -> None:
        self.guessed: list = []
        super().begin(chance)

    def drafting(self, first):
        tree = yield from super().drafting(first)
        self.guessed.append((tree.tokens, tree.parents))
        return tree


@pytest.mark.parametrize("window", [None, 6])
def test_a_round_runs_the_target_and_the_head_once_for_all_texts(target, window, monkeypatch):
    head = small_head(target, "eagle3", sliding_window=window)
    settings, drafter = Settings(max_new_tokens=8, eos_ids=()), HeadDrafter(head, target, Chain(3))
    wanted = alone(target, lambda number: drafter, settings)
    forwards, heads = [], []
    body, forward = target.run_body, head.forward
    monkeypatch.setattr(target, "run_body", lambda ids, **more: forwards.append(ids) or body(ids, **more))
    monkeypatch.setattr(head, "forward", lambda *given, **more: heads.append(1) or forward(*given, **more))
    got = generate_together(target, jobs(lambda number: copy.copy(drafter)), settings, len(PROMPTS))
    assert rounds(got) == rounds(wanted)
    most = max(len(one.accepted) for one in got)
    assert [ids.shape[0] for ids in forwards[: len(PROMPTS)]] == [1] * len(PROMPTS), "each prompt alone"
    assert len(forwards) == len(PROMPTS) + most
    assert forwards[len(PROMPTS)].shape == (len(PROMPTS), 4)
    assert len(heads) == len(PROMPTS) + most * 3 - 1  # two further guesses and a reading, the last round none


@pytest.mark.parametrize("method", ["draft-model", "prompt-lookup", "lookahead", "medusa"])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_every_other_method_is_batched_too(target, method, sampling):
    settings = Settings(max_new_tokens=12, sampling=sampling)
    if method == "draft-model":
        drafter: Drafter = DraftModel(first_layers(target, 6), target, sampling=sampling)
    elif method == "prompt-lookup":
        drafter = PromptLookup()
    elif method == "lookahead":
        drafter = Lookahead(target, 4, 3, 4)
    else:
        config = HeadConfig.for_target(target.config.to_dict(), "medusa", medusa_heads=2)
        torch.manual_seed(0)
        drafter = MedusaDrafter(build_head(config), target, Static(((0,), (1,), (0, 0))))
    got = generate_together(target, jobs(lambda number: copy.copy(drafter)), settings, 3)
    assert rounds(got) == rounds(alone(target, lambda number: drafter, settings))
    assert method != "draft-model" or sum(sum(one.accepted) for one in got) > 0


def test_the_output_map_runs_on_few_rows_at_once_or_on_those_asked_for(target, monkeypatch):
    """Sizes on both sides of the border were used above; here that the rows asked for are the few."""
    rows = []
    real = module.LawsTogether.__init__.__globals__["logits_of_rows"]
    monkeypatch.setitem(
        module.LawsTogether.__init__.__globals__,
        "logits_of_rows",
        lambda model, last: rows.append(len(last)) or real(model, last),
    )
    settings = Settings(max_new_tokens=8, eos_ids=())
    generate_together(target, jobs(lambda number: Scripted([], StaticShape.chain(3), [False])), settings, 5)
    assert set(rows) == {5}, "a root for each text"
    rows.clear()
    generate_together(target, jobs(lambda number: Scripted([], StaticShape.chain(3), [False])), settings, 2)
    assert max(rows) == MOST_AT_ONCE == 8, "two chains of four nodes"


def test_a_batch_cache_is_compacted_in_place_and_closes_ranks():
    cache, kept = BatchCache(3), {}
    for text, length in enumerate((4, 1, 2)):
        one = TargetCache()
        one.update(*(torch.full((1, 2, length, 1), 10.0 * text + sign) for sign in (1, -1)), 0)
        cache.join(one)
        kept[text] = [10.0 * text + 1] * length
    rows = torch.arange(100.0, 115).view(3, 1, 5, 1).expand(-1, 2, -1, -1)
    cache.update(rows, -rows, 0)
    storage = cache.layers[0].keys.untyped_storage().data_ptr()
    cache.keep([[0, 2, 4], [0], [0, 1]])
    assert cache.lengths == [7, 2, 4]
    cache.leave(0)
    assert cache.lengths == [4, 2]
    keys, values = cache.update(rows[:2, :, :1], -rows[:2, :, :1], 0)
    assert keys.untyped_storage().data_ptr() == storage
    assert keys[0, 1, :5, 0].tolist() == [*kept[2], 110, 111, 100]
    assert keys[1, 0, :3, 0].tolist() == [*kept[1], 105, 105]
    assert values[1, 0, 1:3, 0].tolist() == [-105, -105]


def test_a_batch_cache_grows_without_losing_rows_and_holds_no_nan():
    cache, rows = BatchCache(2), torch.randn(2, 2, 700, 4)
    for text in range(2):
        one = TargetCache()
        one.update(rows[text : text + 1, :, :1], rows[text : text + 1, :, :1], 0)
        cache.join(one)
    for start in range(1, 700, 3):
        keys, _ = cache.update(rows[:, :, start : start + 3], rows[:, :, start : start + 3], 0)
        cache.keep([range(min(3, 700 - start))] * 2)
    assert torch.equal(keys, rows)
    assert all(buffer.isfinite().all() for buffer in cache.layers[0]._buffers)


def test_a_prompt_that_leaves_no_room_is_refused_before_any_decoding(target):
    with pytest.raises(UserError, match="prompt: got no tokens"):
        generate_together(
            target, [Job([1], None, SeededChance(0)), Job([], None, SeededChance(0))], Settings(), 2
        )
    assert generate_together(target, [], Settings(), 2) == []
