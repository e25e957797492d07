"""The dry run and the memory that it computes: plans without weights, for one GPU and for a node."""

import json
import re
import subprocess
import sys

import pytest
from common import ROOT, shipped_policy

import train

TOOL = ROOT / ".tools/memory.py"


def peak_of(*flags: str) -> tuple[float, float]:
    """(GB of weights and moments, GB at the peak) by the tool."""
    done = subprocess.run([sys.executable, str(TOOL), *flags], capture_output=True, text=True, check=True)
    found = re.search(r"weights and moments (\S+) GB, peak (\S+) GB", done.stdout)
    return float(found[1]), float(found[2])


def test_inputs_of_blocks_that_wait_on_the_cpu_lower_the_peak():
    state, peak = peak_of("65536", "--layers", "8")
    same, higher = peak_of("65536", "--layers", "8", "--on-gpu")
    assert state == same
    assert state < peak < higher - 1


def test_weights_and_moments_are_twelve_bytes_a_weight_shared_by_the_ranks(tmp_path):
    sizes = {"model_type": "qwen3", "vocab_size": 50_000, "hidden_size": 1000, "intermediate_size": 2000}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 10, "num_key_value_heads": 10, "head_dim": 100}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"tie_word_embeddings": False}))
    n = 2 * 50_000 * 1000 + 2 * (4 * 1000 * 1000 + 3 * 1000 * 2000)
    for ranks in (1, 4):
        state, _ = peak_of("64", "--model", str(tmp_path), "--ranks", str(ranks))
        assert state == pytest.approx(12 * n / ranks / 1e9, abs=0.06)


@pytest.fixture
def laptop(tmp_path):
    """Flags of --preset paper: a model's folder without weights, tasks and documents."""
    model, chat = shipped_policy()
    model.config.max_position_embeddings = 65536
    model.config.save_pretrained(tmp_path / "model")
    chat.tokenizer.save_pretrained(tmp_path / "model")
    lines = [json.dumps({"question": f"Who is {k}?", "answer": "Ada", "id": k}) for k in range(30)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.txt").write_text("Ada is 7.")
    flags = f"--tasks {tmp_path}/tasks.jsonl --model {tmp_path}/model --out {tmp_path}/run"
    return tmp_path, [*flags.split(), "--corpus", f"{tmp_path}/docs"]


def planned(*flags: str) -> tuple[int, str]:
    command = [sys.executable, "train.py", "--dry-run", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize("preset", ["paper", "one-gpu"])
def test_a_preset_of_gpus_is_planned_without_one_and_without_weights(preset, laptop):
    folder, flags = laptop
    sizes = ["--max-context", "40960" if preset == "paper" else "16384", "--eval-tasks", "5"]
    code, said = planned("--preset", preset, *flags, *sizes)
    assert code == 0, said
    assert "25 to train on, 5 held out" in said
    assert re.search(r"memory: +\d+\.\d GB at \d+,\d+ tokens", said)
    assert not (folder / "run").exists()


def test_a_plan_refuses_what_the_run_would(laptop):
    _, flags = laptop
    code, said = planned("--preset", "paper", *flags, "--max-context", "200")
    assert code == 2
    assert "--max-context 200: expected" in said
    code, said = planned("--preset", "paper", *flags[:-2])  # without documents it is the web
    assert code == 2
    assert "SERPER_KEY_ID" in said


def test_the_plan_of_the_first_command(capsys):
    code, said = planned()
    assert code == 0
    assert "640 to train on, 256 held out" in said
    assert "240 in 60 steps" in said
    assert train.make_config([]).dry_run is False


def test_the_preset_of_one_gpu_runs_under_torchrun_on_a_cpu(tmp_path):
    tasks = (ROOT / ".world/held-out.jsonl").read_text().splitlines()[:4]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    (tmp_path / "a.txt").write_text("Ada hired Mira.")
    flags = f"--preset one-gpu --engine hf --model {ROOT}/.world/compaction --tasks {tmp_path}/tasks.jsonl"
    flags += f" --corpus {tmp_path} --out {tmp_path}/run --steps 1 --tasks-per-step 2 --group-size 2"
    flags += " --max-turn-tokens 32 --max-turns 2"
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    subprocess.run([*starter, "train.py", *flags.split()], cwd=ROOT, check=True, capture_output=True)
    (row,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert row["n"] == 4
    assert row["engine_gap"] < 1e-4
