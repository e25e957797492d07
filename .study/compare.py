"""Arms of finished runs in one table, by seed: means with t-intervals, and differences to the first arm.
python eval.py --compare runs/compaction-mosaic-* runs/compaction-broadcast-*
"""

import json
import math
from pathlib import Path
from statistics import fmean, stdev

from harness import expect

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
