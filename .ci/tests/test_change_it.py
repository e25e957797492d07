"""What a fork does: a credit, a reward and a tool of one's own, each one function and one entry of a dict.

Protects the three places at which the README says that the code can be changed, up to a run of train.py.
"""

import ast
import asyncio
import operator
from collections import Counter

import pytest
import torch
from common import (
    PLAIN,
    XML_CALL,
    Scripted,
    Writer,
    lines_of,
    offline_chat,
    run_train,
    small_model,
    texts_of,
    tokenizer,
    write_tasks,
)

import harness
import mosaic
import train

TINY = ["--mode=both", "--steps=1", "--tasks-per-step=2", "--group-size=4", "--minibatches=2"]
TINY.append("--eval-tasks=0")


# ---- A credit ----------------------------------------------------------------------------------------------
def rloo(group: mosaic.Group, config) -> list[torch.Tensor]:
    """Each trajectory against the mean of the others."""
    advantages = []
    for k, reward in enumerate(group.rewards):
        others = group.rewards[:k] + group.rewards[k + 1 :]
        advantage = reward - sum(others) / len(others)
        advantages.append(torch.full((len(group.kinds[k]),), advantage))
    return advantages


@pytest.fixture
def with_rloo(monkeypatch):
    monkeypatch.setitem(mosaic.ADVANTAGES, "rloo", rloo)


def test_a_credit_is_a_function_and_an_entry(with_rloo):
    config = train.make_config(["--advantage=rloo"])
    assert config.advantage == "rloo"


def test_a_credit_without_an_entry_is_refused():
    with pytest.raises(harness.UserError, match="--advantage rloo: expected one of mosaic, broadcast, igpo"):
        train.make_config(["--advantage=rloo"])


# ---- A reward ----------------------------------------------------------------------------------------------
def f1(task: harness.Task, answer: str) -> float:
    """Token F1 with the reference, or with the best of the line's `aliases`."""
    best = 0.0
    given = Counter(harness.answer_words(answer))
    for reference in [task.answer, *task.extra.get("aliases", [])]:
        wanted = Counter(harness.answer_words(reference))
        common = (given & wanted).total()
        best = max(best, 2 * common / (given.total() + wanted.total()))
    return best


@pytest.fixture
def with_f1(monkeypatch):
    monkeypatch.setitem(harness.REWARDS, "f1", f1)


def test_a_reward_is_a_function_and_an_entry(with_f1):
    _, reward = harness.open_world(harness.Setup(reward="f1"))
    assert reward is f1


def test_a_reward_without_an_entry_is_refused():
    with pytest.raises(harness.UserError, match="--reward f1: expected one of exact_match, judge"):
        harness.Setup(reward="f1")


def test_a_task_keeps_the_fields_of_its_line(tmp_path):
    line = {"question": "Who?", "answer": "Mira", "aliases": ["M."], "level": 3}
    (task,) = harness.load_tasks(write_tasks(tmp_path, line))
    assert task.extra["aliases"] == ["M."]
    assert task.extra["level"] == 3


ANSWERS = [("an oak", 1.0), ("an old oak", 2 / 3), ("quercus", 1.0), ("x", 0.0)]


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_a_reward_sees_the_fields_of_the_tasks_line(tmp_path, answer, expected):
    line = {"question": "What did Mira plant?", "answer": "an oak", "aliases": ["Quercus"]}
    (task,) = harness.load_tasks(write_tasks(tmp_path, line))
    tok = tokenizer()
    limits = harness.Limits(mode="single", max_context=1500, max_turn_tokens=200, max_response_tokens=300)
    engine = Writer(tok, lambda _: f"<answer>{answer}</answer><|end|>")
    corpus = harness.Corpus({"b": "Mira planted an oak."}, 1)
    run = harness.rollout(task, engine, tok, limits=limits, tools=corpus, judge=f1)
    assert asyncio.run(run).reward == pytest.approx(expected)


# ---- Both, in a run ----------------------------------------------------------------------------------------
def test_a_step_of_training_with_both(with_rloo, with_f1, tmp_path, monkeypatch):
    monkeypatch.setattr(
        train.phi, "answer_logprob", lambda _, contexts, *__, **___: torch.zeros(len(contexts))
    )
    monkeypatch.setitem(harness.ENGINES, "hf", lambda *_: Scripted(offline_chat()))
    monkeypatch.setattr(train.evaluation, "check_paths", lambda *_: None)  # it draws from no model
    run_train(*TINY, "--parity-tolerance=1e9", "--advantage=rloo", "--reward=f1", f"--out={tmp_path}/run")
    trajectories = lines_of(tmp_path / "run", "trajectories.jsonl")
    (metrics,) = lines_of(tmp_path / "run", "metrics.jsonl")
    assert len(trajectories) == 8
    assert metrics["grad_norm"] > 0
    rewards = [row["reward"] for row in trajectories]
    assert any(0 < reward < 1 for reward in rewards), "F1 was to give parts of a reward"
    for k, row in enumerate(trajectories):
        start = k // 4 * 4
        others = [rewards[i] for i in range(start, start + 4) if i != k]
        expected = row["reward"] - sum(others) / 3
        for session in row["sessions"]:
            assert session["advantage"] == pytest.approx(expected, abs=1e-6)


def test_a_step_of_training_on_tasks_of_ones_own_with_both(with_rloo, with_f1, tmp_path):
    lines = [{"question": f"What is {n}?", "answer": "the oak and", "aliases": []} for n in range(2)]
    tasks = write_tasks(tmp_path, *lines)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("Mira planted an oak.")
    model = small_model(tmp_path / "model")
    flags = [f"--model={model}", f"--tasks={tasks}", f"--corpus={tmp_path}/docs", "--max-context=1500"]
    flags += ["--max-turn-tokens=24", "--max-summary-tokens=16", "--max-response-tokens=200"]
    run_train(*flags, "--steps=1", "--advantage=rloo", "--reward=f1", f"--out={tmp_path}/run")
    assert len(lines_of(tmp_path / "run", "trajectories.jsonl")) == 8


# ---- A tool ------------------------------------------------------------------------------------------------
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value_of(node) -> float:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    raise ValueError("only numbers and + - * /")


async def calculator(agent: harness.Agent, expression: str) -> str:
    """computes an expression of numbers and + - * /"""
    try:
        return str(value_of(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        return f"Error: {error}."


async def between(agent: harness.Agent, low: str, high: str) -> str:
    """counts the numbers between two"""
    return str(int(high) - int(low) - 1)


@pytest.fixture
def with_calculator(monkeypatch):
    monkeypatch.setitem(harness.TOOLS, "calculator", calculator)


CALCULATE = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'


def test_a_tool_is_listed_with_its_arguments_and_its_docstring(with_calculator):
    chat = harness.Chat(tokenizer(PLAIN))
    prompt = chat.decode(chat.main_prompt(harness.Limits(mode="single"), "Who?"))
    assert "\ncalculator(expression): computes an expression of numbers and + - * /\n" in prompt


def test_a_tool_is_listed_in_the_offline_prompt_by_its_name(with_calculator):
    chat = harness.Chat(tokenizer(PLAIN))
    prompt = chat.decode(chat.main_prompt(harness.Limits(mode="both", prompts="offline"), "Who?"))
    assert "Tools: search, visit, delegate, calculator." in prompt


def test_a_subagent_has_the_tool_too(with_calculator):
    chat = harness.Chat(tokenizer(PLAIN))
    prompt = chat.decode(chat.prompt(harness.Limits(mode="both"), "subagent", False, []))
    assert "calculator(expression):" in prompt and "delegate(" not in prompt


@pytest.mark.parametrize("said", [CALCULATE % "6 * 7", XML_CALL % ("calculator", "expression", "6 * 7")])
def test_a_call_of_the_tool_is_read_in_both_spellings(with_calculator, said):
    _, calls = harness.parse_turn(said)
    assert calls == [("calculator", {"expression": "6 * 7"})]


def test_a_call_without_the_tools_argument_is_malformed(with_calculator):
    (call,) = harness.parse_turn(CALCULATE.replace("expression", "query") % "6 * 7")[1]
    assert call == harness.MALFORMED


def played(reply, tok):
    task = harness.Task("From Ada follow taught.", "42", {"b": "Mira planted an oak."}, "t")
    sizes = {"max_context": 1500, "max_turn_tokens": 200, "max_response_tokens": 300, "max_turns": 3}
    limits = harness.Limits(mode="single", **sizes)
    return asyncio.run(harness.rollout(task, Writer(tok, reply), tok, limits=limits))


def test_a_policy_calls_the_tool_and_reads_its_result(with_calculator):
    tok = tokenizer()

    def reply(context):
        if "<tool_response>\n42" in context:
            return "<answer>42</answer><|end|>"
        return CALCULATE % "6 * 7" + "<|end|>"

    trajectory = played(reply, tok)
    assert (trajectory.stop, trajectory.reward, trajectory.malformed) == ("answer", 1.0, 0)


def test_an_error_of_the_tool_is_told(with_calculator):
    tok = tokenizer()
    trajectory = played(lambda _: CALCULATE % "1 / 0" + "<|end|>", tok)
    assert trajectory.stop == "turns"
    assert texts_of(trajectory, tok)[0].count("Error: division by zero.") == 3


def test_a_tool_can_have_two_arguments(monkeypatch):
    monkeypatch.setitem(harness.TOOLS, "between", between)
    tok = tokenizer()
    said = '<tool_call>{"name": "between", "arguments": {"high": 9, "low": "5"}}</tool_call>'
    trajectory = played(lambda _: said + "<|end|>", tok)
    text = texts_of(trajectory, tok)[0]
    assert "between(low, high): counts the numbers between two" in text
    assert text.count("<tool_response>\n3\n</tool_response>") == 3
