"""A running vLLM server's counters are compared with the loop's, prompt by prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from eagle_train.decoding.shapes import Chain
from eagle_train.errors import UserError
from eagle_train.evaluation.server import compare_with_server, server_fault, server_lines
from eagle_train.heads.disk import load_head, save_head

from .servers import QUESTIONS, FakeEngine


@pytest.fixture
def engine(target, head) -> Iterator[FakeEngine]:
    with FakeEngine(target, head, gamma=4) as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def test_the_loop_and_a_server_that_does_the_same_agree_prompt_by_prompt(engine, target, head):
    before = list(engine.sums)
    report = compare_with_server(head, target, engine.url + "/v1/", QUESTIONS, max_new_tokens=30, show=False)
    assert [body["model"] for body in engine.asked] == ["served"] * 3
    assert all(body["temperature"] == 0 and body["max_tokens"] == 30 for body in engine.asked)
    assert report["differences"] == []
    assert report["tree"] == Chain(4).figures
    assert (report["prompts"], report["server"]["engine"]) == (3, "vLLM")
    assert all(body["repetition_penalty"] == 1 for body in engine.asked)  # not what the target's files say
    served = [b - a for a, b in zip(before, engine.sums, strict=True)]
    assert report["server"]["drafts"] == report["loop"]["drafts"] == served[0] > 0
    assert report["server"]["acceptance_length"] == 1 + served[1] / served[0]
    assert report["loop"]["accepted_by_position"] == [count / served[0] for count in served[2:]]
    assert served[1] > 0  # or nothing was compared
    assert server_lines(report)[-1] == "  every text and every counter equal"
    assert server_fault(report) is None


def test_what_is_set_aside_on_both_sides_is_said(engine, target, head, monkeypatch):
    monkeypatch.setattr(target.model.generation_config, "repetition_penalty", 1.7)
    report = compare_with_server(head, target, engine.url, QUESTIONS, max_new_tokens=30, show=False)
    assert report["processors_set_aside"] == {"repetition_penalty": 1.7}
    assert report["differences"] == []
    assert "  on both sides without the target's own repetition_penalty" in server_lines(report)


def test_a_server_with_another_head_is_told_by_its_counters(engine, target, head, tmp_path):
    other = load_head(head)
    with torch.no_grad():
        other.fc.weight.mul_(-1)
    save_head(other, tmp_path / "other")
    report = compare_with_server(
        tmp_path / "other", target, engine.url, QUESTIONS, max_new_tokens=30, show=False
    )
    assert report["differences"]
    assert all(difference["same_text"] for difference in report["differences"])
    assert "prompts differ, 0 of them in their text" in server_lines(report)[-1]
    assert server_fault(report).endswith("of 3 prompts; first: question 0, in its counters")


def test_servers_that_cannot_be_used_are_one_line(engine, target, head):
    engine.drafts = False
    with pytest.raises(
        UserError, match="no vllm:spec_decode counters; wanted a vLLM server that was started"
    ):
        compare_with_server(head, target, engine.url, QUESTIONS, show=False)
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/v1/models: cannot be reached"):
        compare_with_server(head, target, "http://127.0.0.1:9", QUESTIONS, show=False)
    with pytest.raises(UserError, match="wanted one such as http://localhost:8000"):
        compare_with_server(head, target, "localhost:8000", QUESTIONS, show=False)


def test_the_command_prints_both_sides_and_refuses_what_it_cannot_compare(
    engine, head, tiny_target_dir, capsys
):
    from eagle_cli.main import main

    def run(*more: str) -> int:
        asked = ["eval", str(head), "--target", str(tiny_target_dir), "--against-server", engine.url, *more]
        with pytest.raises(SystemExit) as exit_:
            main(asked)
        assert isinstance(exit_.value.code, int)
        return exit_.value.code

    assert run("--num-questions", "2", "--max-new-tokens", "8", "--dtype", "fp32") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(
        "2 prompts, 16 tokens, greedy, chain of 4, up to 8 new tokens; acceptance length as vLLM counts it, "
        "1 + accepted / drafts"
    )
    assert lines[1].startswith(f"  vLLM at {engine.url}: acceptance length ")
    assert lines[2].startswith("  our loop, fp32: acceptance length ")
    assert lines[3] == "  every text and every counter equal"
    assert run("--draft", "dynamic") == 2
    assert "drafts greedily, as the server does, so --draft has no meaning" in capsys.readouterr().err
    answer = engine.answer
    engine.answer = lambda body: [*answer(body)[:-1], 7]
    assert run("--num-questions", "1", "--max-new-tokens", "8", "--dtype", "fp32") == 1
    differs = "error: server and loop differ on 1 of 1 prompt; first: question 0, in its text"
    assert capsys.readouterr().err.splitlines()[-1].startswith(differs[:-22])


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        (
            "--against-server",
            "--gamma=2 --max-turns=1 --block --top-p=0.5 --temperature=0 --seed=1 --report=x.csv --window=9 "
            "--method=plain --other-target --device-map=auto --top-k-sampling=4 --predict=x",
        ),
        (
            "--predict",
            "--window=9 --level=3 --guesses=4 --max-new-tokens=5 --seed=0 --against-server=http://x --block "
            "--repetition-penalty=1.0 --questions=x --num-questions=3 --max-turns=1",
        ),
    ],
)
def test_an_option_that_a_mode_does_not_read_is_refused(mode, options, capsys):
    from eagle_cli.main import main

    for option in options.split():
        with pytest.raises(SystemExit) as left:
            main(["eval", "head", "--target", "t", f"{mode}=http://127.0.0.1:9", option])
        error = capsys.readouterr().err
        assert left.value.code == 2
        assert error.startswith("error: eagle eval: --")
        assert "has no meaning" in error
        assert option.split("=")[0] in error
        assert error.count("\n") == 1
