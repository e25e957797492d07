"""Several processes under torchrun: the same numbers as one, checkpoints for any number, no hang.

Protected: two ranks compute what one process does (Phi on unequal work, updates, a rank without a segment), a
run goes on with another number of ranks, and a rank that dies or refuses ends all of them.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from child import FLAGS, column, rows_of
from ranks import KINDS

import train

ROOT = Path(train.__file__).parent
RANKS = str(Path(__file__).with_name("ranks.py"))
ONE = [sys.executable]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(command, log):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "PYTHONPATH": str(ROOT)}
    with open(log, "w") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )


def wait(process, log, seconds=150):
    """-> (exit code, what all ranks printed). The processes that are left after that time are ended."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"no end after {seconds} seconds:\n{Path(log).read_text()}") from None
    return process.returncode, Path(log).read_text()


def run(command, log):
    return wait(start(command, log), log)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """what one process and two ranks compute"""
    folder = tmp_path_factory.mktemp("equal")
    for starter in (ONE, TWO):
        code, said = run([*starter, RANKS, "equal", str(folder)], folder / "log")
        assert code == 0, said
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_compute_the_phi_and_the_figures_of_one_process(kind, folder):
    one = torch.load(folder / f"{kind}-1.pt")[0]
    two = torch.load(folder / f"{kind}-2.pt")[0]
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_come_to_the_weights_of_one_process(kind, folder):
    one = torch.load(folder / f"{kind}-1.pt")[1:]
    two = torch.load(folder / f"{kind}-2.pt")[1:]
    for weight, other in zip(one, two, strict=True):
        torch.testing.assert_close(weight, other, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """a step of one process, one of two ranks with held-out tasks, one of one process again"""
    out = tmp_path_factory.mktemp("resumed") / "run"
    for steps, starter in enumerate((ONE, TWO, ONE), 1):
        flags = FLAGS.replace("--steps 4", f"--steps {steps}").replace("--eval-tasks 0", "--eval-tasks 4")
        command = [*starter, "train.py", *flags.split(), str(out)]
        code, said = run(command + ["--resume"] * (steps > 1), f"{out}.log")
        assert code == 0, said
    return out


def test_a_run_goes_on_with_another_number_of_ranks(resumed):
    assert column(resumed, "step") == [0, 1, 2]
    assert torch.load(resumed / "checkpoint/trainer.pt", weights_only=True)["step"] == 3


def test_a_step_of_two_ranks_has_as_many_trajectories(resumed):
    assert column(resumed, "n") == [8, 8, 8]
    assert len(rows_of(resumed / "trajectories.jsonl")) == 24


def test_the_engine_of_each_rank_has_the_trainers_weights(resumed):
    assert max(column(resumed, "engine_gap")) < 1e-4


def test_adams_state_moves_with_the_run(resumed):
    state = torch.load(resumed / "checkpoint/trainer.pt", weights_only=True)["optimizer"]["state"]
    steps = {int(entry["step"]) for entry in state.values()}
    assert steps == {6}  # two minibatches a step


def children_of(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return sorted(found)


def test_a_rank_that_dies_ends_the_run(tmp_path):
    out = tmp_path / "run"
    log = tmp_path / "log"
    flags = FLAGS.replace("--steps 4", "--steps 500")
    process = start([*TWO, "train.py", *flags.split(), str(out)], log)
    began = time.time()
    while not (out / "metrics.jsonl").exists():
        assert process.poll() is None and time.time() - began < 120, log.read_text()
        time.sleep(0.1)
    ranks = children_of(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    code, _ = wait(process, log, seconds=60)
    assert code != 0
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_a_rank_whose_engine_differs_ends_all_ranks_with_the_sentence(tmp_path):
    command = [*TWO, RANKS, "odd-gap", *FLAGS.split(), str(tmp_path / "run")]
    code, said = run(command, tmp_path / "log")
    assert code != 0
    assert said.count("train.py: error: --parity-tolerance: engine and trainer differ by") == 2


def test_a_rank_that_refuses_at_load_ends_all_ranks(tmp_path):
    command = [*TWO, RANKS, "odd-load", *FLAGS.split(), str(tmp_path / "run")]
    code, said = run(command, tmp_path / "log")
    assert code != 0
    assert "train.py: error: the ways to a log-prob differ here" in said
