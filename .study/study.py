"""Compares arms of finished runs in the offline world. An arm is a folder's name without the seed at its end:
    python .study/study.py runs/study/compaction-*    # a table of arms: means with t-intervals over seeds
    python .study/study.py runs/study/compaction-{mosaic,broadcast}-1?    # of two arms also the differences
    python .study/study.py FOLDER FOLDER                                  # two runs, each an arm of its own
    python .study/study.py runs/study/*-mosaic-1? --plot curves.png    # curves only; pip install matplotlib
Runs that differ in their number of steps, their limits or their questions are refused.

Shapes: S pairs of runs with the same seed, Q questions.
"""

import argparse
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".tools"))
import reading

import harness
import mosaic
from eval import summarise
from harness import UserError

# As the offline world writes them; .world/make.py has the same.
FACT = re.compile(r"(\w+) (taught|hired|saved|paid|married|painted) (\w+)\.")
QUESTION = re.compile(r"From (\w+) follow ([\w, ]+)\.")
WINDOW = 5  # steps that a point of a learning curve is the mean of
N_BOOTSTRAP = 10_000


# ---- Runs --------------------------------------------------------------------------------------------------
@dataclass
class Run:
    path: Path
    figures: dict  # name -> a number; None: nothing to average
    metrics: list  # rows of metrics.jsonl, one a step
    wins: dict  # id of a held-out question -> 1.0 or 0.0
    questions: list  # all ids that were asked
    limits: dict  # those of the evaluation


def load_run(path):
    """UserError: it is not finished, or not of the offline world."""
    file = path / "eval.json"
    try:
        results = json.loads(file.read_text()) if file.exists() else {}
        after = results.get("after")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: expected what train.py writes ({error})") from None
    if not after or not {"steps", "limits"} <= after.keys():
        raise UserError(f"{path}: expected a finished run, whose eval.json has figures after training")
    metrics = [row for _, row in harness.read_jsonl(path / "metrics.jsonl")]
    if len(metrics) != after["steps"]:
        more = f"{len(metrics)} steps in metrics.jsonl, but {after['steps']} when it was evaluated"
        raise UserError(f"{path}: expected a finished run, found {more}")
    asked = answers_of(path / "after-sampled.jsonl")
    sampled = [row for row in asked if row["reward"] is not None]
    greedy = [row for row in answers_of(path / "after-greedy.jsonl") if row["reward"] is not None]
    if not sampled or not greedy:
        raise UserError(f"{path}: expected answers with a reward, found none")
    figures = {"accuracy_greedy": summarise(greedy)["accuracy"]}
    for name, value in summarise(sampled).items():
        if value is None or isinstance(value, int | float):
            figures[name] = value
    figures |= figures_of_facts(sampled) | figures_of_seconds(metrics, path)
    wins = {row["id"]: float(row["reward"] > mosaic.SUCCESS) for row in sampled}
    return Run(path, figures, metrics, wins, sorted(row["id"] for row in asked), after["limits"])


def answers_of(path):
    rows = []
    for where, row in harness.read_jsonl(path):
        if not {"id", "question", "reference", "reward", "sessions"} <= row.keys():
            raise UserError(f"{where}: expected the line of a trajectory")
        if not QUESTION.fullmatch(row["question"]):
            raise UserError(f"{where}: expected a question of the offline world, not {row['question']!r:.80}")
        rows.append(row)
    return rows


def figures_of_seconds(metrics, path):
    """Seconds of a step, by phase and in all. With igpo, "credit" has the turn-level Phi in it."""
    figures = {}
    for name in metrics[0]:
        if name.startswith("seconds_"):
            try:
                figures[name] = fmean(row[name] for row in metrics)
            except KeyError:
                raise UserError(f"{path}/metrics.jsonl: expected {name} in every line") from None
    figures["seconds_step"] = sum(figures.values())
    return figures


# ---- Useful facts ------------------------------------------------------------------------------------------
def kept_facts(row):
    """(facts that lead to the answer, all facts) of each summary of a trajectory."""
    start, verbs = QUESTION.fullmatch(row["question"]).groups()
    names = [start, *row["reference"].split(", ")]
    useful = set(zip(names, verbs.split(", "), names[1:]))
    counts = []
    for session in row["sessions"]:
        if session["kind"] == "compact":
            summary = session["text"].rsplit("assistant\n", 1)[-1]
            facts = set(FACT.findall(summary))
            counts.append((len(facts & useful), len(facts)))
    return counts


def figures_of_facts(rows):
    """Useful facts of a summary, and their share of all that it holds."""
    counts = []
    for row in rows:
        counts += kept_facts(row)
    shares = [useful / n for useful, n in counts if n]
    return {
        "useful_facts": fmean(useful for useful, _ in counts) if counts else None,
        "useful_share": fmean(shares) if shares else None,
    }


# ---- Statistics --------------------------------------------------------------------------------------------
def t_interval(values):
    """values [n, ...], one a seed -> mean [...] and half of the 95 % t-interval [...]; NaN for one seed."""
    values = torch.tensor(values, dtype=torch.float64)
    n = len(values)
    if n < 2:
        return values.mean(0), torch.full_like(values[0], math.nan)
    quantile = float(reading.T95[min(n - 1, len(reading.T95)) - 1])
    return values.mean(0), quantile * values.std(0) / math.sqrt(n)


def cell(values):
    """A cell of the table; seeds for which there is nothing to average are left out."""
    return reading.t_interval([value for value in values if value is not None])


def bootstrap(gap_SQ):
    """The 95 % interval of the mean, over seeds and questions that are drawn again."""
    generator = torch.Generator().manual_seed(0)
    n_seeds, n_questions = gap_SQ.shape
    means = []
    for _ in range(N_BOOTSTRAP):
        seeds = torch.randint(n_seeds, (n_seeds,), generator=generator)
        questions = torch.randint(n_questions, (n_questions,), generator=generator)
        means.append(gap_SQ[seeds][:, questions].mean())
    return torch.stack(means).quantile(torch.tensor([0.025, 0.975])).tolist()


def mcnemar(n, rarer):
    """McNemar's exact test: p for n answers that are right in one run only, `rarer` of them the rarer way.
    >>> round(mcnemar(12, 1), 4)
    0.0063
    """
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(rarer + 1)) / 2**n)


# ---- Comparing ---------------------------------------------------------------------------------------------
def refuse_different(runs, keys):
    """UserError: two of the runs differ in `keys`, so that their figures say nothing about each other."""
    first = runs[0]
    for run in runs[1:]:
        if len(run.metrics) != len(first.metrics):
            counts = f"{len(first.metrics)} and {len(run.metrics)}"
            raise UserError(f"{first.path} and {run.path} differ in steps: {counts}")
        names = [name for name in keys if run.limits.get(name) != first.limits.get(name)]
        if names:
            raise UserError(f"{first.path} and {run.path} differ in limits: {', '.join(names)}")
        if run.questions != first.questions:
            raise UserError(f"{first.path} and {run.path} were evaluated on different questions")


def arms_of(runs):
    """arm -> seed -> Run. Of two runs, each is an arm of its own."""
    arms = {}
    for run in runs:
        name, _, seed = str(run.path).rpartition("-")
        if len(runs) == 2 or not seed.isdigit():
            name, seed = str(run.path), ""
        arms.setdefault(name, {})[seed] = run
    return arms


def pairs_of(arms):
    """Where there are two arms, their runs with the same seed."""
    if len(arms) != 2:
        return []
    first, second = arms.values()
    return [(first[seed], second[seed]) for seed in first if seed in second]


def differences(pairs, name):
    found = []
    for first, second in pairs:
        both = first.figures.get(name), second.figures.get(name)
        if None not in both:
            found.append(both[0] - both[1])
    return found


def print_table(arms, pairs):
    titles = [f"{arm} ({len(runs)} seeds)" for arm, runs in arms.items()]
    titles += [f"first - second ({len(pairs)} pairs)"] if pairs else []
    print("| | " + " | ".join(titles) + " |")
    print("|" + "---|" * (len(titles) + 1))
    names = {}  # in place of an ordered set
    for runs in arms.values():
        for run in runs.values():
            names |= dict.fromkeys(run.figures)
    for name in names:
        cells = []
        for runs in arms.values():
            cells.append(cell([run.figures.get(name) for run in runs.values()]))
        cells += [cell(differences(pairs, name))] if pairs else []
        print(f"| {name} | {' | '.join(cells)} |")


def print_tests(pairs):
    """A bootstrap, and McNemar's test, which holds for these checkpoints and not for their seeds."""
    ids = set(pairs[0][0].wins)
    for first, second in pairs:
        ids &= first.wins.keys() & second.wins.keys()
    if not ids:
        raise UserError("expected a question that all runs have an answer with a reward to, found none")
    rows = []
    for first, second in pairs:
        rows.append([first.wins[id] - second.wins[id] for id in sorted(ids)])
    gap_SQ = torch.tensor(rows)
    low, high = bootstrap(gap_SQ)
    print(f"accuracy, first - second: {gap_SQ.mean():+.3f}, bootstrap [{low:+.3f}, {high:+.3f}]")
    n = int((gap_SQ != 0).sum())
    rarer = min(int((gap_SQ > 0).sum()), int((gap_SQ < 0).sum()))
    text = f"{n} of {gap_SQ.numel()} answers are right in one only, {rarer} of them the rarer way"
    print(f"{text}: p = {mcnemar(n, rarer):.2g}")


# ---- Learning curves ---------------------------------------------------------------------------------------
def plot(arms, picture):
    """Reward and sessions of training: means over five steps, with their 95 % t-intervals over seeds."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise UserError("--plot: pip install matplotlib") from None
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="tight")
    for axis, name in zip(axes, ("reward", "sessions")):
        for arm, runs in arms.items():
            curves = []
            for run in runs.values():
                curve = torch.tensor([row[name] for row in run.metrics])
                curves.append(curve.unfold(0, WINDOW, 1).mean(-1).tolist())
            mean, half = t_interval(curves)
            steps = range(WINDOW - 1, WINDOW - 1 + len(mean))
            axis.plot(steps, mean, label=arm)
            axis.fill_between(steps, mean - half, mean + half, alpha=0.2)
        axis.set(xlabel="step", ylabel=f"{name} per trajectory")
    axes[0].legend(fontsize="small")
    try:
        figure.savefig(picture, dpi=150)
    except ValueError as error:  # a kind of picture that it does not know
        raise UserError(f"--plot {picture}: {error}") from None


# ---- The program -------------------------------------------------------------------------------------------
def study(paths, picture):
    runs = [load_run(path) for path in paths]
    every_limit = dict.fromkeys(name for run in runs for name in run.limits)
    arms = arms_of(runs)
    if picture:
        every_limit.pop("mode", None)  # curves of several modes may stand beside each other
        refuse_different(runs, every_limit)
        if len(runs[0].metrics) < WINDOW:
            raise UserError(f"--plot: expected runs of {WINDOW} steps or more, found {len(runs[0].metrics)}")
        plot(arms, picture)
        return
    refuse_different(runs, every_limit)
    pairs = pairs_of(arms)
    print_table(arms, pairs)
    if pairs:
        print_tests(pairs)


def main(argv=None):
    parser = argparse.ArgumentParser(usage="%(prog)s RUNS [--plot FILE]", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--plot", default="", help="file for a picture of learning curves; no table then")
    flags = parser.parse_args(argv)
    try:
        study(flags.runs, flags.plot)
    except (UserError, OSError) as error:
        print(f"study.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
