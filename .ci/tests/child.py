"""A run of train.py in a forked child, so that it can be killed, and what it leaves behind."""

import json
import os
import re
import signal
import sys
import traceback
from itertools import count
from pathlib import Path

import harness
import train

POLICY = Path(harness.policy_of(train.make_config(["--mode", "both"])))  # the tiny one that ships
FLAGS = "--mode both --tasks-per-step 2 --group-size 4 --minibatches 2 --steps 4 --checkpoint-every 2"
FLAGS += " --token-budget 99999 --temperature 0.8 --eval-tasks 0 --out "


def limit_flags(**changes) -> str:
    """Flags of the limits that the shipped policy was made for, with changes."""
    flags = []
    made_for = json.loads((POLICY / "limits.json").read_text())
    for name, value in vars(harness.Limits(**(made_for | changes))).items():
        flags.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(flags)


def shipped_policy():
    """(model, Chat) of the policy that ships."""
    return harness.load_policy(str(POLICY))


def offline_tasks(n: int) -> list:
    """Some tasks of the offline world."""
    return train.split_tasks(train.make_config([]))[0][:n]


def start(argv: str, out: Path, patch=None) -> int:
    """train.py in a child, after patch() -> its process id. What it prints goes to `out`.log."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if patch:
            patch()
        train.main(f"{argv}{out}".split())
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def wait(child: int, out: Path) -> tuple[int, str]:
    """-> (exit code, or less than 0 the signal that killed it; what it printed but for progress bars)."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    lines = []
    for line in re.split(r"[\r\n]+", Path(f"{out}.log").read_text()):
        is_bar = re.search(r"it/s|s/it|\d+%\|", line)
        if line.strip() and not is_bar and not line.startswith("results"):
            lines.append(line)
    return code, "\n".join(lines)


def run(argv: str, out: Path, patch=None) -> tuple[int, str]:
    return wait(start(argv, out, patch), out)


def at_call(owner, name: str, n: int, act):
    """A patch: before the n-th call of owner.name comes act(its arguments)."""

    def patch():
        calls = count(1)
        real = getattr(owner, name)

        def wrapped(*args, **options):
            if next(calls) == n:
                act(*args)
            return real(*args, **options)

        setattr(owner, name, wrapped)

    return patch


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics_of(out: Path) -> list[dict]:
    """The lines of metrics.jsonl without the times."""
    rows = []
    for row in rows_of(out / "metrics.jsonl"):
        rows.append({name: value for name, value in row.items() if not name.startswith("seconds_")})
    return rows


def left_behind(out: Path) -> list:
    """All that a run leaves behind, but for times."""
    weights = (out / "checkpoint/model.safetensors").read_bytes()
    return [metrics_of(out), rows_of(out / "trajectories.jsonl"), weights]


def column(out: Path, name: str) -> list:
    return [row[name] for row in rows_of(out / "metrics.jsonl")]
