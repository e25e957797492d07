"""Reading what runs have left: a trajectory with the credit of its sessions, and a table of arms.
python eval.py --show runs/compaction-mosaic-0/trajectories.jsonl
python eval.py --compare runs/compaction-mosaic-* runs/compaction-broadcast-*
"""

import json
import math
from pathlib import Path
from statistics import fmean, stdev

import harness
from harness import expect


# ---- A trajectory ------------------------------------------------------------------------------------------
def show(path, line):
    """Print a trajectory of a file with its sessions' credit; line 0: the last of those with the most."""
    rows = harness.read_jsonl(path)
    for where, row in rows:
        expect({"question", "sessions"} <= row.keys(), f"--show {where}: expected the line of a trajectory")
    expect(0 <= line <= len(rows), f"--line {line}: expected 1 to {len(rows)}")
    where, row = rows[line - 1] if line else max(reversed(rows), key=lambda pair: len(pair[1]["sessions"]))
    print(where)
    for key in ("question", "reference", "answer", "reward", "stop"):
        print(f"{key + ':':<11}{row[key]}")
    final = row["sessions"][-1]
    for j, session in enumerate(row["sessions"], 1):
        # A fork is told before its main session, which ends later; it says where its result went.
        merged = f", merged at token {session['before'][1]}" if session["kind"] == "subagent" else ""
        words = [] if session["advantage"] is None else ["advantage {advantage:+.3f}"]
        if session is final:
            words.append("final, so no gain")
        elif session["phi_before"] is not None:
            words.append("Phi {phi_before:.3f} -> {phi_after:.3f}, gain {gain:+.3f} nats")
        if session is not final and session["normalised"]:
            dropped = ", which is not in its advantage" if session["advantage"] == final["advantage"] else ""
            words.append("{normalised:+.2f} in its kind" + dropped)
        credit = ", ".join(words).format(**session)
        print(f"\n--- session {j}, {session['kind']}{merged}: {credit}")
        print("      | " + session["text"].strip().replace("\n", "\n      | "))


# ---- Arms --------------------------------------------------------------------------------------------------
# Student's t at 0.975 with 1, 2, ... degrees of freedom; for more of them the last one, which is too wide.
T95 = "12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179 2.160 2.145 2.131".split()
COMPARED = "accuracy accuracy_greedy sessions sessions_success sessions_failure positive_ig".split()
COMPARED += ["ig_per_session", "tokens"]


def t_interval(values):
    """The mean with its 95 % t-interval over seeds, with Student's t at 0.975 for n - 1 degrees of freedom.
    >>> t_interval([1.0, 2.0, 3.0])
    '2.000 ± 2.484'
    """
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else ""
    quantile = float(T95[min(len(values) - 1, len(T95)) - 1])
    return f"{fmean(values):.3f} ± {quantile * stdev(values) / math.sqrt(len(values)):.3f}"


def compare(paths):
    """A row for each arm (folders of runs but for the seed at the end), and for its difference to the first,
    paired by seed. UserError: a run is not finished, or was evaluated in another way than the first."""
    arms, ways = {}, {}
    for path in paths:
        file = Path(path, "eval.json")
        row = json.loads(file.read_text()).get("after") if file.exists() else None
        expect(row, f"--compare {path}: expected a finished run with an eval.json")
        arm, _, seed = path.rstrip("/").rpartition("-")
        arms.setdefault(arm, {})[seed] = row
        ways.setdefault(json.dumps([row[key] for key in ("limits", "steps", "n")]), path)
    expect(len(ways) == 1, f"--compare: {' and '.join(ways.values())} differ in limits, steps or questions")
    first = next(iter(arms))
    print("| arm (seeds) | " + " | ".join(COMPARED) + " |\n|" + "---|" * (len(COMPARED) + 1))
    for arm, runs in arms.items():
        means, differences = [], []
        for key in COMPARED:
            values = {seed: row[key] for seed, row in runs.items() if row.get(key) is not None}
            base = {seed: row[key] for seed, row in arms[first].items() if row.get(key) is not None}
            means.append(t_interval([*values.values()]))
            differences.append(t_interval([values[seed] - base[seed] for seed in values if seed in base]))
        print(f"| {arm} ({len(runs)}) | " + " | ".join(means) + " |")
        if arm != first:
            n = len(runs.keys() & arms[first].keys())
            print(f"| its difference to {first} ({n}) | " + " | ".join(differences) + " |")
