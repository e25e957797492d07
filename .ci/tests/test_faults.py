"""What happens to a run of days: killed anywhere, a full disk, NaN, tools that raise, services that are down.

Protected: a run that was resumed is the run that was never interrupted, a checkpoint is always whole, and one
trajectory, gradient or answer that is lost takes nothing else with it, silently least of all.
"""

import json
import os
import re
import resource
import shutil
import signal
import time
from itertools import count
from pathlib import Path

import pytest
import torch
import transformers
from child import (
    FLAGS,
    POLICY,
    at_call,
    column,
    left_behind,
    limit_flags,
    metrics_of,
    offline_tasks,
    rows_of,
    run,
    shipped_policy,
    start,
    wait,
)
from common import Scripted
from loopback import Reply, Server, fresh_session
from safetensors.torch import load_file

import eval as evaluation
import harness
import mosaic
import phi
import train

RESUME = "--resume " + FLAGS


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """what an uninterrupted run leaves behind"""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert run(FLAGS, out) == (0, "")
    assert column(out, "step") == [0, 1, 2, 3]
    return left_behind(out)


# ---- Killed ------------------------------------------------------------------------------------------------
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def tear(_, path):
    """half of a file, and dead"""
    Path(path).write_bytes(b"PK" * 99)
    kill()


def tear_line(path, rows):
    """half of a line, and dead"""
    with path.open("a") as file:
        file.write(json.dumps(rows[0])[:99])
    kill()


def half_remove():
    """a patch: the first folder with a checkpoint that is removed loses its weights, and then dead"""
    real = shutil.rmtree

    def removing(path, *args, **options):
        weights = Path(path, "model.safetensors")
        if weights.exists():
            weights.unlink()
            kill()
        real(path, *args, **options)

    shutil.rmtree = removing


PLACES = {  # a checkpoint is saved before the first step, and after the second and the fourth
    "in a rollout": at_call(harness, "roll_out", 4, kill),
    "in credit": at_call(train, "credit", 8, kill),
    "in an update": at_call(mosaic, "policy_loss", 7, kill),
    "in the middle of a line of metrics": at_call(harness, "append_jsonl", 7, tear_line),
    "in the middle of a line of trajectories": at_call(harness, "append_jsonl", 8, tear_line),
    "in the first line of trajectories": at_call(harness, "append_jsonl", 2, tear_line),
    "before weights are written": at_call(transformers.PreTrainedModel, "save_pretrained", 2, kill),
    "in the middle of the optimizer's state": at_call(torch, "save", 2, tear),
    "before the old checkpoint is set aside": at_call(Path, "rename", 3, kill),
    "before a checkpoint is in its place": at_call(Path, "rename", 4, kill),
    "before the last checkpoint is in its place": at_call(Path, "rename", 6, kill),
    "after an old checkpoint was half removed": half_remove,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_was_killed_and_resumed_equals_one_that_was_not(place, whole, tmp_path):
    out = tmp_path / "run"
    assert run(FLAGS, out, PLACES[place])[0] == -signal.SIGKILL
    assert run(RESUME, out) == (0, "")
    assert left_behind(out) == whole
    folders = [path.name for path in out.iterdir() if "checkpoint" in path.name]
    assert folders == ["checkpoint"]


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(whole, tmp_path):
    out = tmp_path / "run"
    assert run(FLAGS, out, at_call(torch, "save", 1, tear))[0] == -signal.SIGKILL
    assert run(FLAGS, out) == (0, "")
    assert left_behind(out) == whole


def test_a_run_that_was_killed_twice_equals_one_that_was_not(whole, tmp_path):
    out = tmp_path / "run"
    assert run(FLAGS, out, PLACES["in credit"])[0] == -signal.SIGKILL
    assert run(RESUME, out, at_call(mosaic, "policy_loss", 2, kill))[0] == -signal.SIGKILL
    assert run(RESUME, out) == (0, "")
    assert left_behind(out) == whole


def test_a_run_that_was_killed_in_two_saves_has_a_whole_checkpoint(whole, tmp_path):
    out = tmp_path / "run"
    assert run(FLAGS, out, PLACES["before a checkpoint is in its place"])[0] == -signal.SIGKILL
    assert run(RESUME, out, at_call(torch, "save", 1, tear))[0] == -signal.SIGKILL
    assert run(RESUME, out) == (0, "")
    assert left_behind(out) == whole


def test_ctrl_c_ends_the_run_at_once_with_130_and_it_can_be_resumed(whole, tmp_path):
    out = tmp_path / "run"
    child = start(FLAGS, out, at_call(train, "credit", 7, lambda *_: time.sleep(15)))
    while not (out / "metrics.jsonl").exists() or len(rows_of(out / "metrics.jsonl")) < 3:
        time.sleep(0.05)
    time.sleep(1)
    began = time.time()
    os.kill(child, signal.SIGINT)
    code, said = wait(child, out)
    assert (code, said) == (130, "")
    assert time.time() - began < 8
    assert run(RESUME, out) == (0, "")
    assert left_behind(out) == whole


def test_a_finished_run_can_be_resumed_for_more_steps(whole, tmp_path):
    out = tmp_path / "run"
    assert run(FLAGS.replace("--steps 4", "--steps 2"), out) == (0, "")
    assert run(RESUME, out) == (0, "")
    assert left_behind(out) == whole


def test_a_run_that_was_killed_while_it_wrote_its_config_can_be_resumed(whole, tmp_path):
    out = tmp_path / "run"
    assert run(FLAGS, out, PLACES["in credit"])[0] == -signal.SIGKILL

    def torn(path, text):
        path.open("w").write(text[:40])
        kill()

    assert run(RESUME, out, at_call(Path, "write_text", 1, torn))[0] == -signal.SIGKILL
    assert run(RESUME, out) == (0, "")
    assert left_behind(out) == whole


# ---- A full disk -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("full", ["logs", "weights", "optimizer"])
def test_a_full_disk_ends_the_run_with_a_sentence_and_the_last_checkpoint_is_good(full, whole, tmp_path):
    out = tmp_path / "run"
    weights = (POLICY / "model.safetensors").stat().st_size
    limit = {"logs": 2_000, "weights": weights // 2, "optimizer": 3 * weights // 2}[full]

    def fill(*_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    def patch():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        at_call(harness, "roll_out", 2, fill)()

    code, said = run(FLAGS, out, patch)
    assert code == 2
    assert re.fullmatch(r"train.py: error: .*(too large|cannot be written).*", said)
    assert run(RESUME, out) == (0, "")
    assert left_behind(out) == whole


# ---- Numbers that are not finite ---------------------------------------------------------------------------
def is_finite(folder):
    return all(torch.isfinite(weight).all() for weight in load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize("what", ["loss", "log-probs"])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(what, tmp_path):
    out = tmp_path / "run"
    loss = mosaic.policy_loss
    logprobs = phi.token_logprobs
    calls = count()

    def factor():  # two minibatches a step, of one forward each: those of step 1
        return float("nan") if next(calls) in (2, 3) else 1.0

    def broken_loss(*args):
        return loss(*args) * factor()

    def broken_logprobs(*args, with_entropy=False, **options):
        if not with_entropy:  # of Phi
            return logprobs(*args, **options)
        rows, entropies = logprobs(*args, with_entropy=True, **options)
        k = factor()
        return [row * k for row in rows], entropies

    def patch():
        if what == "loss":
            mosaic.policy_loss = broken_loss
        else:
            phi.token_logprobs = broken_logprobs

    assert run(FLAGS, out, patch)[0] == 0
    assert column(out, "skipped") == [0, 2, 0, 0]
    assert is_finite(out / "checkpoint")


def test_gradients_that_are_never_finite_leave_the_weights_as_they_were(tmp_path):
    out = tmp_path / "run"
    loss = mosaic.policy_loss

    def patch():
        mosaic.policy_loss = lambda *args: loss(*args) * float("inf")

    assert run(FLAGS, out, patch)[0] == 0
    assert column(out, "skipped") == [2, 2, 2, 2]
    before = shipped_policy()[0].state_dict()
    for name, weight in load_file(out / "checkpoint/model.safetensors").items():
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_phi_that_is_not_finite_gives_no_gain(value, tmp_path):
    out = tmp_path / "run"
    real = phi.answer_logprob
    calls = count()

    def broken(*args, **options):
        phi_n = real(*args, **options)
        return torch.full_like(phi_n, value) if next(calls) == 1 else phi_n

    def patch():
        phi.answer_logprob = broken

    assert run(FLAGS, out, patch)[0] == 0
    has_gain = [False] * 4
    for row in rows_of(out / "trajectories.jsonl"):
        for session in row["sessions"][:-1]:
            if session["gain"]:
                has_gain[row["step"]] = True
    assert has_gain == [True, False, True, True]
    assert column(out, "skipped") == [0, 0, 0, 0]
    assert is_finite(out / "checkpoint")


def test_an_engine_that_differs_from_the_trainer_ends_the_run_with_a_sentence(tmp_path):
    code, said = run("--parity-tolerance 1e-9 " + FLAGS, tmp_path / "run")
    assert code == 2
    assert re.match(r"train.py: error: --parity-tolerance.*: engine and trainer differ by \S+ nats", said)


# ---- Trajectories that are lost ----------------------------------------------------------------------------
def test_a_rollout_that_raises_is_dropped_and_shown(tmp_path):
    out = tmp_path / "run"
    real = harness.Agent.call
    calls = count()

    async def fails_at_times(self, *call):
        if next(calls) % 60 == 7:
            raise KeyError("a bug of a tool")
        return await real(self, *call)

    def patch():
        harness.Agent.call = fails_at_times

    code, said = run(FLAGS, out, patch)
    assert code == 0
    assert "a bug of a tool" in said
    assert "Traceback" in said
    assert sum(column(out, "dropped")) > 0
    for row in metrics_of(out):
        assert row["dropped"] == 8 - row["n"]
    assert all(row["reward"] is not None for row in rows_of(out / "trajectories.jsonl"))


def test_where_all_rollouts_raise_the_run_ends_with_a_sentence_and_can_be_resumed(whole, tmp_path):
    out = tmp_path / "run"

    def fail(*_):
        raise RuntimeError("a bug of the engine")

    def patch():
        at_call(harness, "roll_out", 3, lambda *_: setattr(harness.HFEngine, "sample", fail))()

    code, said = run(FLAGS, out, patch)
    assert code == 2
    assert "a bug of the engine" in said
    assert re.search(r"train.py: error: step 2 lost .*'error': 8", said.splitlines()[-1])
    assert run(RESUME, out) == (0, "")
    assert left_behind(out) == whole


def losing(n):
    """a patch: from the second step on, n of the 8 trajectories of a step have no reward"""

    def patch():
        real = harness.roll_out
        calls = count()

        def lossy(*args, **options):
            trajectories = real(*args, **options)
            if next(calls) >= 1:
                for trajectory in trajectories[:n]:
                    trajectory.reward = None
                    trajectory.stop = "infra"
            return trajectories

        harness.roll_out = lossy

    return patch


def test_a_step_that_lost_more_than_half_ends_the_run_with_a_checkpoint_of_those_before(tmp_path):
    out = tmp_path / "run"
    flags = FLAGS.replace("--checkpoint-every 2", "--checkpoint-every 9")
    code, said = run(flags, out, losing(5))
    assert code == 2
    assert re.search(r"error: step 1 lost .*'infra': 5", said)
    assert column(out, "step") == [0]
    assert torch.load(out / "checkpoint/trainer.pt", weights_only=True)["step"] == 1
    assert run("--resume " + flags, out) == (0, "")
    assert column(out, "step") == [0, 1, 2, 3]


def test_a_step_that_lost_half_trains_on_the_others(tmp_path):
    out = tmp_path / "run"
    assert run(FLAGS, out, losing(4))[0] == 0
    assert column(out, "dropped") == [0, 4, 4, 4]
    assert column(out, "n") == [8, 4, 4, 4]


# ---- Services ----------------------------------------------------------------------------------------------
KEY = "sesame-key"
(TASK,) = offline_tasks(1)


class World:
    """/retrieve and a judge; `down` names the one that is, `refusal` is the judge's"""

    def __init__(self):
        self.server = Server()
        self.server.answer = self.answer
        self.down = ""
        self.flaky = False
        self.refusal = ""
        self.seen = count(1)

    def answer(self, request):
        body = request.json()
        is_search = "queries" in body
        if self.down == ("search" if is_search else "judge"):
            return Reply(503, f"not now, {KEY}")
        if self.flaky and next(self.seen) % 4 == 0:
            return [Reply(500), Reply(fault="close"), Reply(200, "{}")][next(self.seen) % 3]
        if is_search:
            words = body["queries"][0].split()
            found = sorted(TASK.docs.items(), key=lambda doc: doc[0] not in words)[: body["topk"]]
            rows = [{"document": {"id": name, "contents": text}} for name, text in found]
            return Reply(200, json.dumps({"result": [rows]}))
        if self.refusal:
            return Reply(404, self.refusal)
        texts = json.loads(body["messages"][0]["content"].removeprefix(harness.PROMPTS["judge"]["grade"]))
        verdict = "yes" if texts["answer"] == texts["reference"] else "no"
        words = f"They agree or not.\ncorrect: {verdict}"
        return Reply(200, json.dumps({"choices": [{"message": {"content": words}}]}))


@pytest.fixture
def world():
    world = World()
    yield world
    world.server.close()


def own_run(world, folder, patch=None, flags=""):
    """a run on four tasks of one's own, searched and judged by `world`"""
    lines = []
    for k in range(4):
        lines.append(json.dumps({"question": TASK.question, "answer": TASK.answer, "id": str(k)}))
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    flags += f" --model {POLICY} --tasks {folder}/tasks.jsonl {limit_flags(mode='both')}"
    flags += f" --search-url {world.server.url}retrieve --parity-tolerance 1e9 --steps 3"
    flags += " --checkpoint-every 9 --out "

    def surroundings():
        chat = shipped_policy()[1]
        evaluation.check_paths = lambda *_: None  # a scripted engine draws from no model
        harness.ENGINES["hf"] = lambda *_: Scripted(chat)
        harness.SESSION = fresh_session()
        time.sleep = lambda seconds: None
        os.environ.update(API_BASE=world.server.url, API_KEY=KEY, no_proxy="127.0.0.1")
        if patch:
            patch()

    return run(flags, folder / "run", surroundings)


def mentions_key(folder):
    return any(KEY.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_services_that_fail_at_times_cost_no_trajectory(world, tmp_path):
    world.flaky = True
    assert own_run(world, tmp_path)[0] == 0
    out = tmp_path / "run"
    assert column(out, "dropped") == [0, 0, 0]
    assert max(column(out, "reward")) > 0.2
    assert not mentions_key(tmp_path)


@pytest.mark.parametrize("down", ["search", "judge"])
def test_a_service_that_is_down_ends_the_run_and_resume_goes_on(down, world, tmp_path):
    out = tmp_path / "run"

    def patch():
        at_call(harness, "roll_out", 2, lambda *_: world_goes_down())()

    def world_goes_down():
        harness.requests.post(world.server.url + "down", json={"queries": [down], "topk": 1})

    served = world.answer

    def answer(request):
        if request.path == "/down":
            world.down = down
            return Reply()
        return served(request)

    world.server.answer = answer
    code, said = own_run(world, tmp_path, patch)
    assert code == 2
    assert re.search(r"step 1 lost .*'infra': \d", said.splitlines()[-1])
    assert "Traceback" not in said
    assert torch.load(out / "checkpoint/trainer.pt", weights_only=True)["step"] == 1
    world.down = ""
    code, said = own_run(world, tmp_path, flags="--resume")
    assert code == 0, said
    assert column(out, "step") == [0, 1, 2]
    assert not mentions_key(tmp_path)


def test_a_judge_that_refuses_ends_the_run_at_once_with_its_words_and_no_key(world, tmp_path):
    world.refusal = f"The model is retired, {KEY}"
    code, said = own_run(world, tmp_path)
    assert code == 2
    assert said.startswith("train.py: error: ")
    assert len(said.splitlines()) == 1
    assert "404" in said
    assert "The model is retired" in said
    assert not mentions_key(tmp_path)


# ---- Evaluations -------------------------------------------------------------------------------------------
def evaluate(out, *flags):
    evaluation.main(["--n", "4", "--out", str(out), *flags])


def test_an_evaluation_that_was_killed_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    out = tmp_path / "answers.jsonl"
    evaluate(out)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:3]))
    asked = []
    real = harness.roll_out

    def watched(tasks, *args, **options):
        asked.extend(task.id for task in tasks)
        return real(tasks, *args, **options)

    monkeypatch.setattr(harness, "roll_out", watched)
    evaluate(out, "--resume")
    assert asked == [json.loads(lines[3])["id"]]
    assert out.read_text().splitlines(keepends=True)[:3] == lines[:3]
    assert len(out.read_text().splitlines()) == 4


def test_an_evaluation_that_was_killed_within_a_line_says_what_to_do_or_goes_on(tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    evaluate(out)
    data = out.read_bytes()
    out.write_bytes(data[: len(data) - 99])
    capsys.readouterr()
    try:
        evaluate(out, "--resume")
        assert '"n": 4' in capsys.readouterr().out
        assert len(rows_of(out)) == 4
    except SystemExit as end:
        assert end.code == 2
        assert "answers.jsonl:4" in capsys.readouterr().err


def test_an_evaluation_keeps_the_file_that_stood_in_its_place(tmp_path):
    out = tmp_path / "answers.jsonl"
    out.write_text("precious\n")
    evaluate(out)
    assert (tmp_path / "answers.jsonl.old").read_text() == "precious\n"


def test_a_phi_that_fails_costs_an_evaluation_no_answers(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(phi, "score_sessions", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate(tmp_path / "answers.jsonl")
    assert len(rows_of(tmp_path / "answers.jsonl")) == 4


def test_an_evaluation_without_any_verdict_says_so(world, tmp_path, monkeypatch, capsys):
    world.down = "judge"
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(harness, "SESSION", fresh_session())
    chat = shipped_policy()[1]
    monkeypatch.setitem(harness.ENGINES, "hf", lambda *_: Scripted(chat))
    monkeypatch.setattr(evaluation, "check_paths", lambda *_: None)
    monkeypatch.setenv("API_BASE", world.server.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": TASK.question, "answer": TASK.answer}))
    flags = f"--model {POLICY} --search-url {world.server.url} --tasks {tmp_path}/tasks.jsonl {limit_flags()}"
    with pytest.raises(SystemExit) as end:
        evaluation.main(f"{flags} --out {tmp_path}/a.jsonl".split())
    assert end.value.code == 2
    assert "search or judge is down" in capsys.readouterr().err.splitlines()[-1]
