"""``eagle eval`` and ``eagle generate`` as they are typed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from eagle_cli import options
from eagle_cli.eval_output import following
from eagle_cli.main import main
from eagle_train.evaluation import comparison
from eagle_train.shards.schema import MANIFEST
from eagle_train.targets.load import load_target


@pytest.fixture(scope="module")
def head_dir(head_dir: Path) -> str:
    return str(head_dir)


def eagle(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return int(left.value.code or 0)


def test_eval_prints_figures_and_the_next_command(head_dir, tiny_target_dir, capsys):
    code = eagle(
        *("eval", head_dir, "--target", tiny_target_dir, "--num-questions", 2, "--max-turns", 1),
        *("--max-new-tokens", 6, "--draft", "chain", "--draft", "dynamic", "--tree-tokens", 9, "--depth", 2),
    )
    out, told = capsys.readouterr()
    assert code == 0
    assert told.splitlines()[0] == (  # before anything is decoded
        "eval: 2 prompts by plain decoding and 2 other ways, up to 6 tokens each: at most 36 tokens"
    )
    assert "chain of 3" in out
    assert "dynamic tree of 9 nodes (top-k 10, depth 2)" in out
    assert out.count("equal to plain decoding on every prompt") == 2
    assert out.splitlines()[-1].startswith("tau below 1.05: hardly a guess is right; train longer, on more ")
    assert "eagle export" not in out


@pytest.mark.parametrize(("tau", "exported"), [(1.0, False), (1.049, False), (1.05, True)])
def test_export_is_named_for_a_head_that_has_learned(tau, exported):
    heads = [{"method": "eagle3", "tau": 1.0}, {"method": "eagle3", "tau": tau}]
    line = following([{"results": [*heads, {"method": "prompt-lookup", "tau": 3.0}]}], "my run")
    assert (line == "next: eagle export 'my run' --engine vllm --out served/") == exported
    assert ("train longer" in line) != exported


@pytest.mark.parametrize(
    ("device", "draft", "words"),
    [
        ("cpu", [], " --draft chain --num-questions 10"),
        ("cpu", ["--draft", "my tree.json"], " --draft 'my tree.json' --num-questions 10"),
        ("cuda", [], ""),
        ("cuda", ["--draft", "chain"], " --draft chain"),
    ],
)
def test_the_next_eval_is_short_and_a_chain_where_there_is_no_gpu(device, draft, words, monkeypatch):
    monkeypatch.setattr("eagle_train.targets.load.default_device", lambda: torch.device(device))
    assert options.eval_command("my run", "org/target", draft) == (
        f"eagle eval 'my run' --target org/target{words}"
    )


def test_json_is_the_only_thing_on_standard_output(head_dir, tiny_target_dir, tmp_path, capsys):
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"question_id": 1, "category": "c", "turns": ["Why?"]}\n')
    code = eagle(
        *("eval", head_dir, "--target", tiny_target_dir, "--questions", questions, "--max-new-tokens", 4),
        *("--draft", "chain", "--gamma", 2, "--temperature", 0.7, "--top-p", 0.9, "--json"),
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["tree"] == {"draft": "chain", "nodes": 3, "depth": 2}
    assert report["temperature"] == 0.7


def test_a_difference_in_fp32_is_exit_1_with_a_clear_line(head_dir, tiny_target_dir, capsys, monkeypatch):
    def wrong(*given, **more):
        made = real(*given, **more)
        made.ids[1] += 1
        return made

    real = comparison.generate
    monkeypatch.setattr(comparison, "generate", wrong)
    arguments = ("eval", head_dir, "--target", tiny_target_dir, "--num-questions", 1, "--max-new-tokens", 4)
    assert eagle(*arguments) == 1
    captured = capsys.readouterr()
    assert "token 1, where the two best logits are" in captured.out
    assert "error: greedy answers differ from plain decoding in fp32" in captured.err
    assert eagle(*arguments, "--dtype", "bf16") == 0  # there a near-tie may flip: told, not an error


def test_predicting_needs_no_target_for_shards(head_dir, tiny_shards_dir, capsys):
    assert eagle("eval", head_dir, "--predict", tiny_shards_dir, "--gamma", 2) == 0
    out, told = capsys.readouterr()
    assert told.splitlines()[-1].startswith("eval --predict: ")
    assert "predicted without decoding" in out
    assert out.splitlines()[-1].startswith(f"next: eagle eval {head_dir} --target ")
    assert eagle("eval", head_dir, "--predict", tiny_shards_dir, "--json") == 0
    assert json.loads(capsys.readouterr().out)["predicted"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no --target"),
        (
            ("--target", "T", "--draft", "chian"),
            "--draft chian: wanted one of chain, static, dynamic, sampled, or a .json of eagle tune; did you",
        ),
        (
            ("--target", "T", "--gamma", "5", "--depth", "2"),
            "--gamma 5: a size of a chain draft; give --draft chain with it",
        ),
        (("--target", "T", "--draft", "chain", "--depth", "2"), "--depth 2: a size of a dynamic draft"),
        (
            ("--predict", "S", "--max-turns", "1"),
            "--predict decodes nothing, so --max-turns has no meaning",
        ),
        (("--target", "T", "--gamma", "0", "--draft", "chain"), "chain: got 0 guesses"),
        (("--target", "T", "--temperature", "-1"), "temperature: got -1"),
        (("--target", "T", "--questions", "nothing.jsonl"), "nothing.jsonl: No such file"),
    ],
)
def test_what_the_user_must_change_is_one_line_and_exit_2(
    head_dir, tiny_target_dir, capsys, arguments, words
):
    arguments = tuple(str(tiny_target_dir) if argument == "T" else argument for argument in arguments)
    assert eagle("eval", head_dir, *arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error


def test_generate_writes_the_answer_and_its_counts(head_dir, tiny_target_dir, capsys, monkeypatch):
    target = load_target(str(tiny_target_dir), dtype="fp32", device="cpu")
    from eagle_train.decoding.loop import Settings, plain
    from eagle_train.evaluation.questions import Question, conversations

    ((_, conversation),) = conversations(target.tokenizer, [Question("", "", ("Tell me a story",))])
    wanted = plain(target, conversation.ask(0), Settings(max_new_tokens=24)).ids
    text = target.tokenizer.decode(wanted, skip_special_tokens=True)
    arguments = ("generate", head_dir, "--target", tiny_target_dir, "--max-new-tokens", 24)
    assert eagle(*arguments, "--prompt", "Tell me a story") == 0
    out = capsys.readouterr().out
    assert text in out
    assert f"\n{len(wanted) - 1} tokens in {len(wanted) - 1} rounds after the prefill's one: " in out
    assert "acceptance length" in out
    monkeypatch.setattr("sys.stdin", io.StringIO("Tell me a story"))
    assert eagle(*arguments, "--draft", "chain", "--gamma", 2) == 0
    out = capsys.readouterr().out
    assert text in out
    chosen = ["--draft", "chain", "--gamma", "2"]
    following = options.eval_command(head_dir, str(tiny_target_dir), chosen)
    assert out.splitlines()[-1] == f"next: {following}"
    assert " --draft chain --gamma 2" in following
    assert eagle(*arguments, "--prompt", " ") == 2
    assert "prompt: got an empty text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("folder{}", "is a folder; give {option} the name of a file"),
        ("file/x{}", "file is a file, wanted a folder; choose another {option}"),
        ("file/deeper/x{}", "file is a file, wanted a folder; choose another {option}"),
        ("n" * 250 + "{}", "cannot be written (File name too long); choose another {option}"),
        ("/proc/x{}", "cannot be written ("),
    ],
)
@pytest.mark.parametrize(("command", "option"), [("eval", "--report"), ("tune", "--out")])
def test_figures_that_could_not_be_written_are_not_made(command, option, name, words, tmp_path, capsys):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").touch()
    path = tmp_path / name.format(".json")
    assert eagle(command, "no-head", "--target", "no-target", option, path) == 2  # nothing is loaded before
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option} {path}: ")
    assert words.format(option=option) in error
    assert error.count("\n") == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder.json"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *[("a.json", text) for text in ("", "[]", '{"reports": []}', '{"reports": [{"target": "t"}]}')],
        *[("a.csv", text) for text in ("", "set,tau\n1,2\n")],
        *[("a.html", text) for text in ("", "<!doctype html>\n<title>eagle train</title>")],
    ],
)
@pytest.mark.parametrize("given", [["--predict", "no-shards"], ["--target", "no-target"]])
def test_a_file_that_is_no_report_is_not_replaced_by_one(name, content, given, tmp_path, capsys):
    file = tmp_path / name
    file.write_text(content)
    assert eagle("eval", "no-head", *given, "--report", file) == 2  # nothing is loaded before
    error = capsys.readouterr().err
    assert error.startswith(f"error: --report {file}: there is a file that is no report of eagle eval, ")
    assert error.count("\n") == 1
    assert file.read_text() == content


@pytest.mark.parametrize(
    ("command", "option", "words"),
    [
        (["eval", "no-head", "--predict", "no-shards"], "--report", "report of eagle eval"),
        (["tune", "no-head", "--target", "no-target"], "--out", "draft of eagle tune"),
    ],
)
def test_shards_do_not_lose_their_record_to_figures(command, option, words, tiny_shards_dir, capsys):
    record = tiny_shards_dir / MANIFEST
    before = record.read_bytes()
    assert eagle(*command, option, record) == 2  # nothing is loaded before
    assert f"error: {option} {record}: there is a file that is no {words}, " in capsys.readouterr().err
    assert record.read_bytes() == before


def test_a_draft_takes_the_place_of_an_earlier_one_alone(tmp_path, capsys):
    file = tmp_path / "a.json"
    for content, is_draft in (("", False), ("{}", False), ('{"draft": "chain", "gamma": 2}', True)):
        file.write_text(content)
        assert eagle("tune", "no-head", "--target", "./no-target", "--out", file) == 2
        assert ("no draft of eagle tune" in capsys.readouterr().err) is not is_draft
        assert file.read_text() == content


def test_a_file_of_figures_may_lie_in_a_new_folder(tmp_path):
    from eagle_train.evaluation.outputs import check_output

    (tmp_path / "old.json").write_text("{}")
    check_output("--out", tmp_path / "a" / "b" / "new.json")
    check_output("--out", tmp_path / "old.json")
    assert [one.name for one in tmp_path.iterdir()] == ["old.json"]
