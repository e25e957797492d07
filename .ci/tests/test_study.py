"""What the programs in .study say about runs, on two small folders that are written by hand: no training.

Protected: the figures (means, t-intervals, differences paired by seed, McNemar's p, useful facts, the shares
of claims 4 and 5), and that runs which are unfinished, short or unlike are refused with a sentence.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from common import ROOT, is_clear

STUDY = ROOT / ".study"
LIMITS = {"mode": "compaction", "max_context": 220}
TURN = "<|im_start|>user\nSummarize.<|im_end|>\n<|im_start|>assistant\n%s<|im_end|>\n"


def module(name):
    spec = importlib.util.spec_from_file_location(name, STUDY / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made  # dataclasses look themselves up
    spec.loader.exec_module(made)
    return made


study = module("study")
claims = module("claims")


# ---- Folders of runs ---------------------------------------------------------------------------------------
def session(kind="normal", text="", gain=None, advantage=None) -> dict:
    return {"kind": kind, "text": text, "gain": gain, "advantage": advantage}


def answer(k: int, reward, summary="") -> dict:
    """A held-out answer; with a summary, of three sessions."""
    sessions = [session()]
    if summary:
        sessions = [session(gain=1.0), session("compact", TURN % summary, -0.5), session()]
    row = {"id": f"held-out-0-{k}", "question": "From Ada follow paid, hired.", "reference": "Nora, Dino"}
    row |= {"answer": "", "reward": reward, "stop": "answer", "malformed": 0, "tokens": 100}
    return row | {"sessions": sessions}


def attempt(step: int, reward: float, gains: list, advantages: list) -> dict:
    """A trajectory of training, whose sessions alternate between normal and compact."""
    sessions = []
    for j, (gain, advantage) in enumerate(zip(gains, advantages, strict=True)):
        sessions.append(session(("normal", "compact")[j % 2], "", gain, advantage))
    return {"step": step, "id": "train-1-0", "reward": reward, "sessions": sessions}


def write_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder, right, n=16, steps=2, summary="", limits=LIMITS):
    """A finished run that answers the questions in `right`, and greedily the first one -> its path."""
    folder.mkdir()
    metrics = []
    for step in range(steps):
        metrics.append(
            {"step": step, "reward": 0.5, "sessions": 2.0, "seconds_rollout": 3.0, "seconds_phi": 1.0}
        )
    write_lines(folder / "metrics.jsonl", metrics)
    answers = [answer(k, float(k in right), summary) for k in range(n)]
    write_lines(folder / "after-sampled.jsonl", answers)
    write_lines(folder / "after-greedy.jsonl", [answer(k, float(k == 0)) for k in range(n)])
    after = {"steps": steps, "limits": limits, "n": n}
    (folder / "eval.json").write_text(json.dumps({"before": {"steps": 0, "limits": limits}, "after": after}))
    return str(folder)


def write_trajectories(folder, rows):
    folder.mkdir(exist_ok=True)
    write_lines(folder / "trajectories.jsonl", rows)
    return str(folder)


def refusal(capsys, program, *argv: str) -> str:
    """The sentence with which a program ends."""
    with pytest.raises(SystemExit) as ending:
        program.main(list(argv))
    said = capsys.readouterr()
    assert ending.value.code == 2
    assert not said.out, "a table was begun before the refusal"
    assert is_clear(said.err) and said.err.count("\n") == 1
    return said.err


# ---- The table ---------------------------------------------------------------------------------------------
def test_two_runs_side_by_side(tmp_path, capsys):
    first = write_run(tmp_path / "first", range(12))
    second = write_run(tmp_path / "second", range(11, 13))
    study.main([first, second])
    table = capsys.readouterr().out
    assert f"| | {first} (1 seeds) | {second} (1 seeds) | first - second (1 pairs) |" in table
    assert "| accuracy | 0.750 | 0.125 | 0.625 |" in table
    assert "| accuracy_greedy | 0.062 | 0.062 | 0.000 |" in table
    assert "| seconds_step | 4.000 | 4.000 | 0.000 |" in table
    assert "| useful_facts |  |  |  |" in table  # no summary, nothing to average
    assert "accuracy, first - second: +0.625, bootstrap [+0." in table
    # 11 to 1: 2 (1 + 12) / 2^12
    assert "12 of 16 answers are right in one only, 1 of them the rarer way: p = 0.0063\n" in table


def test_arms_are_paired_by_seed(tmp_path, capsys):
    paths = []
    for arm, right in (("mosaic", (12, 8, 16)), ("broadcast", (8, 8))):
        for seed, k in enumerate(right, 10):
            paths.append(write_run(tmp_path / f"{arm}-{seed}", range(k)))
    study.main(paths)
    table = capsys.readouterr().out
    assert f"{tmp_path}/mosaic (3 seeds) | {tmp_path}/broadcast (2 seeds) | first - second (2 pairs)" in table
    # t with 2 degrees of freedom times .25 / sqrt 3; the differences are .25 and 0, t with 1 times .125.
    half = 4.303 * 0.25 / math.sqrt(3)
    assert f"| accuracy | 0.750 ± {half:.3f} | 0.500 ± 0.000 | 0.125 ± {12.706 * 0.125:.3f} |" in table
    assert "accuracy, first - second: +0.125, bootstrap [+0.000, +0." in table
    assert "4 of 32 answers are right in one only, 0 of them the rarer way: p = 0.12\n" in table


def test_three_arms_have_no_differences(tmp_path, capsys):
    paths = [write_run(tmp_path / f"{arm}-1", range(8)) for arm in ("a", "b", "c")]
    study.main(paths)
    table = capsys.readouterr().out
    assert "| accuracy | 0.500 | 0.500 | 0.500 |" in table
    assert "first - second" not in table


def test_useful_facts(tmp_path, capsys):
    """Two facts of which one leads to the answer; the right names with another verb do not."""
    path = write_run(tmp_path / "one-1", range(8), summary="Ada paid Nora. Nora saved Dino.")
    study.main([path])
    table = capsys.readouterr().out
    assert "| useful_facts | 1.000 |" in table
    assert "| useful_share | 0.500 |" in table
    assert "| sessions | 3.000 |" in table
    assert "| ig_per_session_compact | -0.500 |" in table


def test_questions_without_a_verdict_are_left_out(tmp_path, capsys):
    first = write_run(tmp_path / "first", range(16))
    second = write_run(tmp_path / "second", range(16))
    rows = [answer(k, None if k < 4 else 1.0) for k in range(16)]
    write_lines(tmp_path / "second" / "after-sampled.jsonl", rows)
    study.main([first, second])
    assert (
        "0 of 12 answers are right in one only, 0 of them the rarer way: p = 1\n" in capsys.readouterr().out
    )


# ---- Learning curves ---------------------------------------------------------------------------------------
def test_learning_curves_of_two_modes(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    first = write_run(tmp_path / "compaction-1", range(8), steps=6)
    second = write_run(tmp_path / "subagent-1", range(8), steps=6, limits=LIMITS | {"mode": "subagent"})
    picture = tmp_path / "curves.png"
    study.main([first, second, f"--plot={picture}"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "--plot" in refusal(capsys, study, first, f"--plot={tmp_path / 'curves.xyz'}")


def test_curves_of_short_runs_are_refused(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = write_run(tmp_path / "short-1", range(8), steps=4)
    assert "runs of 5 steps or more, found 4" in refusal(capsys, study, path, f"--plot={tmp_path / 'a.png'}")


# ---- Refusals ----------------------------------------------------------------------------------------------
def test_runs_that_differ_are_refused(tmp_path, capsys):
    first = write_run(tmp_path / "first", range(8))
    longer = write_run(tmp_path / "longer", range(8), steps=3)
    wider = write_run(tmp_path / "wider", range(8), limits=LIMITS | {"max_context": 440})
    forking = write_run(tmp_path / "forking", range(8), limits=LIMITS | {"mode": "subagent"})
    fewer = write_run(tmp_path / "fewer", range(8), n=12)
    assert "differ in steps: 2 and 3" in refusal(capsys, study, first, longer)
    assert "differ in limits: max_context" in refusal(capsys, study, first, wider)
    assert "differ in limits: mode" in refusal(capsys, study, first, forking)
    assert "different questions" in refusal(capsys, study, first, fewer)


def test_runs_that_are_not_finished_are_refused(tmp_path, capsys):
    assert "nowhere: expected a finished run" in refusal(capsys, study, str(tmp_path / "nowhere"))
    path = write_run(tmp_path / "run-1", range(8))
    metrics = tmp_path / "run-1" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 2}\n')  # it was resumed with more steps
    assert "found 3 steps in metrics.jsonl, but 2" in refusal(capsys, study, path)
    metrics.unlink()
    assert "metrics.jsonl" in refusal(capsys, study, path)
    file = tmp_path / "run-1" / "eval.json"
    file.write_text(json.dumps({"before": {"steps": 0}}))
    assert "expected a finished run" in refusal(capsys, study, path)
    file.write_text('{"before": {"st')
    assert "eval.json: expected what train.py writes" in refusal(capsys, study, path)


def test_answers_that_say_nothing_are_refused(tmp_path, capsys):
    path = write_run(tmp_path / "run-1", range(8))
    file = tmp_path / "run-1" / "after-sampled.jsonl"
    write_lines(file, [answer(k, None) for k in range(16)])
    assert "expected answers with a reward" in refusal(capsys, study, path)
    write_lines(file, [answer(0, 1.0) | {"question": "What did Mira plant?"}])
    assert "expected a question of the offline world" in refusal(capsys, study, path)
    write_lines(file, [{"id": "held-out-0-0"}])
    assert "expected the line of a trajectory" in refusal(capsys, study, path)


# ---- Claims 4 and 5 ----------------------------------------------------------------------------------------
def test_claims(tmp_path, capsys):
    """One mixed group, whose successes are in M4's order and whose failures are not: the shorter one has the
    higher advantage. Every success is above every failure. Normal sessions gain 1, compact ones -1."""
    group = [
        attempt(0, 1.0, [0.0], [1.2]),
        attempt(0, 1.0, [1.0, -1.0, 0.0], [0.9, 0.7, 0.8]),
        attempt(0, 0.0, [0.0], [-0.5]),
        attempt(0, 0.0, [1.0, -1.0, 0.0], [-0.9, -0.9, -0.9]),
    ]
    alike = [attempt(1, 1.0, [0.0], [0.0]), attempt(1, 1.0, [1.0, 1.0, 0.0], [0.1, 0.1, 0.1])]
    path = write_trajectories(tmp_path / "mosaic-1", group + alike)
    claims.main([path])
    table = capsys.readouterr().out
    assert table.startswith(
        "| run | normal | compact | subagent | successes | failures | success over failure |"
    )
    # Of 1, -1, 1, -1 the deviation is 2 / sqrt 3, so scores are ±.866; without spread they are 0.
    assert f"| {path} | 0.577 | -0.577 |  | 1.000 | 0.000 | 1.000 |" in table


def test_equal_advantages_are_in_no_order(tmp_path, capsys):
    """Broadcast's; and a run that did not measure gains says nothing of claim 4."""
    group = [
        attempt(0, 1.0, [None], [0.5]),
        attempt(0, 1.0, [None, None, None], [0.5, 0.5, 0.5]),
        attempt(0, 0.0, [None], [-1.0]),
    ]
    path = write_trajectories(tmp_path / "broadcast-1", group)
    claims.main([path])
    assert f"| {path} |  |  |  | 0.000 |  | 1.000 |" in capsys.readouterr().out


def test_claims_of_what_is_no_training_are_refused(tmp_path, capsys):
    assert "trajectories.jsonl" in refusal(capsys, claims, str(tmp_path))
    path = write_trajectories(tmp_path / "run-1", [answer(0, 1.0)])
    assert "expected a trajectory of training" in refusal(capsys, claims, path)
    (tmp_path / "run-1" / "trajectories.jsonl").write_text('{"step": 0, "id"')
    assert "trajectories.jsonl:1" in refusal(capsys, claims, path)


# ---- As programs -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["study", "claims"])
def test_programs_run_from_anywhere(tmp_path, name):
    command = [sys.executable, STUDY / f"{name}.py", "nowhere"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(f"{name}.py: error: nowhere")


STUB = """import sys
from pathlib import Path

flags = sys.argv[1:]
print(*sys.argv, file=open("log", "a"))
out = Path(flags[flags.index("--out") + 1])
if sys.argv[0] == "train.py":
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.jsonl").write_text('{"step": 0}\\n{"step": 1}\\n')
else:
    print('{"accuracy": 0.5, "limits": {}}')
"""


def test_run_sh_skips_what_is_finished_and_resumes_what_was_stopped(tmp_path):
    """With programs that only note their flags."""
    script = tmp_path / ".study" / "run.sh"
    runs = tmp_path / "runs" / "study"
    world = tmp_path / ".world" / "compaction"
    for folder in (
        script.parent,
        world,
        runs / "compaction-mosaic-7",
        runs / "compaction-broadcast-7/checkpoint",
    ):
        folder.mkdir(parents=True)
    script.write_text((STUDY / "run.sh").read_text())
    (tmp_path / "train.py").write_text(STUB)
    (tmp_path / "eval.py").write_text(STUB)
    (world / "limits.json").write_text('{"max_context": 220}')
    (runs / "compaction-mosaic-7" / "eval.json").write_text('{"before": {}, "after": {}}')
    write_lines(runs / "compaction-mosaic-7" / "after-sampled.jsonl", [answer(k, 1.0) for k in range(3)])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(script), "compaction", "7", "--steps", "2"]
    subprocess.run(command, check=True, env=os.environ | {"PATH": path}, capture_output=True)
    log = (tmp_path / "log").read_text().splitlines()
    trained = [line for line in log if line.startswith("train.py")]
    arms = [line.split()[2].removeprefix("runs/study/compaction-") for line in trained]
    ablations = ["mosaic-no-session-aware-7", "mosaic-no-shaping-7"]
    assert arms == ["broadcast-7", "igpo-7", *ablations, "single-broadcast-7"]
    assert [line.endswith("--resume") for line in trained] == [True, False, False, False, False]
    assert ["--measure-gains" in line for line in trained] == [True, True, False, False, False]
    assert all("--steps 2" in line and "--seed 7" in line for line in trained)
    # The arm in single sessions is evaluated as Mosaic's run was, on as many questions.
    assert "--mode single" in trained[-1] and "--max-context=220" in trained[-1]
    assert all("--like runs/study/compaction-mosaic-7" in line and "--n 3" in line for line in log[-2:])
    results = json.loads((runs / "compaction-single-broadcast-7" / "eval.json").read_text())
    assert results == {"after": {"accuracy": 0.5, "limits": {}, "steps": 2}}


def test_run_sh_wants_a_mode():
    ended = subprocess.run(["bash", str(STUDY / "run.sh"), "both"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "expected a mode" in ended.stderr
