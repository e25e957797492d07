"""Claims 4 and 5 of the report, from the trajectories of training. An empty cell has nothing to average.
    python .study/claims.py runs/study/*-mosaic-1?

normal, compact, subagent   claim 4: the mean normalised gain of sessions of that kind, if M8 took all kinds
                            together; by kind, as M8 has it, each of these means is 0
successes, failures         claim 5: of the pairs with unlike session counts in groups with both outcomes, the
                            share in M4's order: the advantage falls with the sessions of successes, and
                            rises with those of failures
success over failure        of all pairs of both, the share in which the success has the higher advantage
"""

import argparse
import sys
from itertools import combinations, groupby
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import mosaic
from harness import UserError

ORDERS = ("successes", "failures", "success over failure")


def groups_of(path):
    """The groups of a run, lists of rows of its trajectories.jsonl."""
    rows = []
    for where, row in harness.read_jsonl(path / "trajectories.jsonl"):
        sessions = row.get("sessions")
        if "step" not in row or not sessions or sessions[-1]["advantage"] is None:
            raise UserError(f"{where}: expected a trajectory of training, with its credit")
        rows.append(row)
    groups = groupby(rows, key=lambda row: (row["step"], row["id"]))
    return [list(group) for _, group in groups]


def pooled_scores(group):
    """Pairs (kind, normalised gain) of the sessions of a group, all kinds together. No gains: no pairs."""
    kinds, gains = [], []
    for row in group:
        kinds.append([session["kind"] for session in row["sessions"]])
        gains.append([session["gain"] for session in row["sessions"]])
    if any(None in gains_N for gains_N in gains):
        return []
    alike = [["any"] * len(kinds_N) for kinds_N in kinds]
    pairs = []
    for kinds_N, scores_N in zip(kinds, mosaic.normalise_by_kind(gains, alike)):
        pairs += zip(kinds_N[:-1], scores_N.tolist())  # final sessions have no gain
    return pairs


def ordered_pairs(group):
    """Pairs (which of ORDERS, whether it holds) of a group; none where all end alike."""
    points = []
    for row in group:  # the last session has no gain, so its advantage is the trajectory's own
        success = row["reward"] > mosaic.SUCCESS
        points.append((success, len(row["sessions"]), row["sessions"][-1]["advantage"]))
    if len({success for success, _, _ in points}) < 2:
        return []
    pairs = []
    for first, second in combinations(points, 2):
        success, n, advantage = first
        other_success, other_n, other_advantage = second
        if success != other_success:
            name, first_leads = "success over failure", success
        elif n != other_n:
            name, first_leads = "successes" if success else "failures", (n < other_n) == success
        else:
            continue
        holds = advantage > other_advantage if first_leads else advantage < other_advantage
        pairs.append((name, holds))
    return pairs


def figures_of(path):
    """column -> the mean of a run, or None."""
    found = {name: [] for name in (*mosaic.KINDS, *ORDERS)}
    for group in groups_of(path):
        for name, value in pooled_scores(group) + ordered_pairs(group):
            found[name].append(value)
    return {name: fmean(values) if values else None for name, values in found.items()}


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs; they need not be finished")
    flags = parser.parse_args(argv)
    columns = (*mosaic.KINDS, *ORDERS)
    try:
        rows = [(path, figures_of(path)) for path in flags.runs]
    except UserError as error:
        print(f"claims.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print("| run | " + " | ".join(columns) + " |")
    print("|" + "---|" * (len(columns) + 1))
    for path, figures in rows:
        cells = ["" if figures[name] is None else f"{figures[name]:.3f}" for name in columns]
        print(f"| {path} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
