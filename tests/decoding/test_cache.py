"""Caches: refused rows leave no trace, and a target reads a tree as it reads each of its branches alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_train.decoding.cache import HeadCache, TargetCache
from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.reader import TargetReader
from eagle_train.decoding.shapes import Chain, Dynamic, Static
from eagle_train.decoding.trees import Tree
from eagle_train.errors import UserError
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.targets.load import Target, load_target

PROMPT = [5, 17, 250, 33, 8, 121, 64, 9, 200, 31, 77, 4]
TREE = Tree((11, 40, 41, 42, 50, 51, 60), (-1, 0, 0, 0, 1, 2, 4))


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="fp32", device="cpu")


def branch(tree: Tree, node: int) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, tree.parents[path[0]])
    return path


@torch.inference_mode()
def test_every_node_is_read_as_if_its_branch_stood_alone(target):
    with TargetReader(target, (1, 4)) as reader:
        reader.read(PROMPT)
        seen = reader.read_tree(TREE)
    for node in range(len(TREE)):
        text = [TREE.tokens[i] for i in branch(TREE, node)]
        with TargetReader(target, (1, 4)) as alone:
            wanted = alone.read([*PROMPT, *text])
        torch.testing.assert_close(seen.last[node], wanted.last[-1], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(seen.aux[node], wanted.aux[-1], atol=2e-5, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("node", range(len(TREE)))
def test_kept_rows_leave_the_cache_as_if_nothing_else_had_been_read(target, node):
    path = branch(TREE, node)
    with TargetReader(target, ()) as reader:
        reader.read(PROMPT)
        seen = reader.read_tree(TREE)
        rows = reader.keep(TREE, path[1:], 99, seen)
        assert rows.start == len(PROMPT)
        assert rows.tokens.tolist() == [*(TREE.tokens[i] for i in path), 99]
        after = reader.read([99, 3])
    with TargetReader(target, ()) as alone:
        alone.read([*PROMPT, *(TREE.tokens[i] for i in path)])
        wanted = alone.read([99, 3])
    assert reader.cache.length == alone.cache.length == len(PROMPT) + len(path) + 2
    torch.testing.assert_close(after.last, wanted.last, atol=2e-5, rtol=1e-4)
    for ours, theirs in zip(reader.cache.layers, alone.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, atol=2e-5, rtol=1e-4)


def test_the_cache_is_compacted_in_place():
    cache = TargetCache()
    rows = torch.arange(20.0).view(1, 2, 10, 1)
    cache.update(rows, -rows, 0)
    layer = cache.layers[0]
    storage = layer.keys.untyped_storage().data_ptr()
    cache.keep(4, [0, 3, 5])
    assert layer.keys[0, 1, :, 0].tolist() == [10, 11, 12, 13, 14, 17, 19]
    assert layer.values[0, 0, :, 0].tolist() == [0, -1, -2, -3, -4, -7, -9]
    assert layer.keys.untyped_storage().data_ptr() == storage
    assert cache.get_seq_length() == cache.length == 7
    keys, _ = cache.update(rows[:, :, :2], rows[:, :, :2], 0)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 7, 9, 0, 1]
    assert keys.untyped_storage().data_ptr() == storage


def test_the_cache_grows_without_losing_rows():
    cache, rows = TargetCache(), torch.randn(1, 2, 700, 4)
    for start in range(0, 700, 7):
        keys, values = cache.update(rows[:, :, start : start + 7], 2 * rows[:, :, start : start + 7], 0)
    assert torch.equal(keys, rows)
    assert torch.equal(values, 2 * rows)


def test_the_heads_cache_attends_like_plain_attention_with_repeated_keys():
    torch.manual_seed(0)
    cache = HeadCache()
    q, k, v = torch.randn(9, 6, 4), torch.randn(9, 2, 4), torch.randn(9, 2, 4)
    causal = torch.full((9, 9), -torch.inf).triu(1)
    repeated_k, repeated_v = (x.repeat_interleave(3, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ repeated_k.mT / 2 + causal
    wanted = (scores.softmax(-1) @ repeated_v).transpose(0, 1)
    whole = HeadCache().attend(0, q, k, v, None, causal=True)
    torch.testing.assert_close(whole, wanted)
    for start, end in ((0, 4), (4, 5), (5, 9)):
        part = cache.attend(
            0, q[start:end], k[start:end], v[start:end], causal[start:end, :end], causal=False
        )
        cache.length = end
        torch.testing.assert_close(part, wanted[start:end])


def save(folder: Path, config) -> str:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return str(folder)


def sizes(**more) -> dict:
    return {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        **more,
    }


def windowed_configs() -> dict:
    from transformers import Gemma3TextConfig, MistralConfig, Qwen2Config

    mixed = ["sliding_attention", "full_attention"] * 4
    return {
        "mistral": MistralConfig(**sizes(sliding_window=16)),
        "qwen2": Qwen2Config(**{k: v for k, v in sizes().items() if k != "head_dim"}),
        "gemma3": Gemma3TextConfig(
            **sizes(sliding_window=16, layer_types=mixed, query_pre_attn_scalar=8, tie_word_embeddings=False)
        ),
    }


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sliding_windows_are_kept_right(tmp_path, family, attention):
    """Texts twice as long as the window: equal to transformers' own greedy text."""
    target = load_target(save(tmp_path / family, windowed_configs()[family]), dtype="fp32", device="cpu")
    target.model.set_attn_implementation(attention)
    prompt = [(37 * i + 5) % 290 for i in range(21)]
    settings = Settings(max_new_tokens=24, eos_ids=())
    wanted = target.model.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    assert len(set(wanted)) > 1
    assert plain(target, prompt, settings).ids == wanted
    head = build_head(HeadConfig.for_target(target.config.to_dict(), "eagle3"))
    for shape in (Chain(3), Static(), Dynamic(20, 4, 4)):
        assert generate(target, HeadDrafter(head, target, shape), prompt, settings).ids == wanted


def test_layers_with_a_running_state_are_refused(target, monkeypatch):
    monkeypatch.setattr(target.config, "layer_types", ["full_attention", "linear_attention"], raising=False)
    with pytest.raises(UserError, match="layers of kind linear_attention"):
        TargetReader(target, ())
