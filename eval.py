"""Evaluation: held-out accuracy, what the sessions were worth, trajectories to read, runs to compare.
Left out on purpose: pass@k, majority votes, the scorers of other benchmarks.
    python eval.py --model runs/compaction-mosaic-0/checkpoint            # sampled; or --greedy
    python eval.py --show runs/compaction-mosaic-0/trajectories.jsonl     # the credit of each session
    python eval.py --compare runs/compaction-* --plot curves.png          # arms, with intervals over seeds
"""

import asyncio
import dataclasses
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean

import torch
from tqdm import tqdm
from transformers.hf_argparser import HfArg

import harness
import mosaic
import phi
from harness import Limits, Trajectory


# ---- Rollouts and what their sessions are worth ------------------------------------------------------------
def roll_out(tasks: list, engine, chat, limits: Limits, world=(), progress: str = "") -> list[Trajectory]:
    """One rollout per task, all at once, with world (tools, judge); `progress` names the bar."""

    async def all_of_them():
        with tqdm(total=len(tasks), desc=progress, leave=False, disable=not progress) as bar:
            rollouts = [harness.rollout(task, engine, chat, "", limits, *world) for task in tasks]
            jobs = list(map(asyncio.create_task, rollouts))
            for job in jobs:
                job.add_done_callback(lambda _: bar.update())
            return await asyncio.gather(*jobs)

    return asyncio.run(all_of_them())


def potentials_at(model, places: list, chat, token_budget: int) -> list[float]:
    """Phi (M6), in nats per answer token, at places (trajectory, segment, position)."""
    requests = [(t.segments[segment].token_ids, p, chat.foreign(t.reference)) for t, segment, p in places]
    return phi.potentials(model, requests, chat.cue, token_budget).tolist()


def score_sessions(model, trajectories: list[Trajectory], chat, token_budget: int = 16384) -> None:
    """Write Phi before and after it, and its information gain (M7), into every session but the final ones."""
    paid = [(t, session) for t in trajectories for session in t.sessions[:-1] if t.reference]
    places = [(t, *place) for t, session in paid for place in (session.before, session.after)]
    values = iter(potentials_at(model, places, chat, token_budget))
    for _, session in paid:
        session.phi_before, session.phi_after = next(values), next(values)
    for t in trajectories:
        before, after = ([getattr(s, key) for s in t.sessions] for key in ("phi_before", "phi_after"))
        for session, gain in zip(t.sessions, mosaic.information_gain(before, after).tolist()):
            session.gain = gain


def score_forks(model, trajectories: list[Trajectory], chat, token_budget: int = 16384) -> None:
    """Ours, for forks in place of M7: Phi at the end without and with what the fork returned."""
    forks = [(t, s) for t in trajectories for s in t.sessions if s.kind == "subagent" and t.reference]
    nothing, requests = chat.response(chat.own(harness.NO_RESULT)), []
    for t, fork in forks:
        (index, start), (_, stop) = fork.before, fork.after
        # The end is where the policy began its last turn, and so before its answer, or was told to compact.
        merges = [s.after[1] for s in t.sessions[:-1] if s.after[0] == index and s.kind == "subagent"]
        main = next(s for s in t.sessions if s.segment == index and s.kind == "normal")
        ids, end = t.segments[index].token_ids, min(main.stop, max(*merges, t.segments[index].turns[-1]))
        without, answer = ids[:start] + nothing + ids[stop:end], chat.foreign(t.reference)
        requests += [(without, len(without), answer), (ids, end, answer)]
    without_n, with_n = phi.potentials(model, requests, chat.cue, token_budget).view(-1, 2).T
    gains_n = mosaic.counterfactual_gain(with_n, without_n)
    for (_, fork), *values in zip(forks, without_n.tolist(), with_n.tolist(), gains_n.tolist()):
        fork.phi_before, fork.phi_after, fork.gain = values


def describe(t: Trajectory, chat) -> dict:
    """A trajectory as plain data: a line of trajectories.jsonl and of an evaluation."""
    row = {"id": t.task.id, "question": t.task.question, "reference": t.task.answer, "asked": t.reference}
    row |= {key: getattr(t, key) for key in ("answer", "reward", "stop", "malformed")}
    row |= {"tokens": sum(len(segment.token_ids) for segment in t.segments), "sessions": []}
    for session in t.sessions:
        ids = t.segments[session.segment].token_ids[session.start : session.stop]
        row["sessions"].append({**dataclasses.asdict(session), "text": chat.decode(ids)})
    return row


def kept_facts(row: dict) -> list[tuple[int, int]]:
    """(facts that lead to the answer, all facts) of each summary; the offline world's only."""
    match = harness.QUESTION.fullmatch(row["question"])
    names = [match[1], *row["reference"].split(", ")] if match else []
    useful = set(zip(names, match[2].split(", "), names[1:])) if match else set()
    summaries = [s["text"].rsplit("assistant\n", 1)[-1] for s in row["sessions"] if s["kind"] == "compact"]
    stated = [set(harness.FACT.findall(summary)) for summary in summaries if match]
    return [(len(facts & useful), len(facts)) for facts in stated]


def summarise(rows: list[dict]) -> dict:
    """Figures of described trajectories that have a reward; None where there is none. Gains: nats a token."""

    def average(values) -> float | None:
        return fmean(values) if (values := list(values)) else None

    wins = [row for row in rows if row["reward"] > mosaic.SUCCESS]
    losses = [row for row in rows if row["reward"] <= mosaic.SUCCESS]
    paid = [session for row in rows if row.get("asked", True) for session in row["sessions"][:-1]]
    facts = [pair for row in rows for pair in kept_facts(row)]
    reward = average(row["reward"] for row in rows)
    figures = {"n": len(rows), "accuracy": len(wins) / len(rows), "reward": reward}
    for name, some in (("success", wins), ("failure", losses)):
        figures[f"sessions_{name}"] = average(len(row["sessions"]) for row in some)
    figures["facts_kept"] = average(useful for useful, _ in facts)  # per summary
    figures["facts_precision"] = average(useful / stated for useful, stated in facts if stated)
    for kind in ("", *mosaic.KINDS):  # "": of any kind
        some, key = [s for s in paid if kind in ("", s["kind"])], kind and f"_{kind}"
        figures[f"sessions{key}"] = average(sum(kind in ("", s["kind"]) for s in r["sessions"]) for r in rows)
        figures[f"positive_ig{key}"] = average(session["gain"] > 0 for session in some)
        figures[f"ig_per_session{key}"] = average(session["gain"] for session in some)
    figures["tokens"] = average(row["tokens"] for row in rows)
    figures["tokens_per_session"] = figures["tokens"] / figures["sessions"]
    figures["malformed"] = sum(row["malformed"] for row in rows)
    return {**figures, "stops": dict(Counter(row["stop"] for row in rows))}


# ---- Reading and comparing ---------------------------------------------------------------------------------
def show(path: str, n: int) -> None:
    """Print the last n trajectories of a file, session by session with their credit."""
    credit = "Phi {phi_before:.3f} -> {phi_after:.3f}, gain {gain:+.3f} nats, {normalised:+.2f} in its kind"
    for where, row in harness.read_jsonl(path)[-n:]:
        if not {"question", "sessions"} <= row.keys():
            raise harness.UserError(f"--show {where}: expected a trajectory, as in trajectories.jsonl")
        print("=" * 100, where, sep="\n")
        for key in ("question", "reference", "answer", "reward", "stop"):
            print(f"{key + ':':<11}{row[key]}")
        for j, session in enumerate(row["sessions"], 1):
            print("\n--- session {}, {kind}, advantage {advantage:+.3f}".format(j, **session))
            print("    final: no gain" if j == len(row["sessions"]) else "    " + credit.format(**session))
            print("      | " + session["text"].strip().replace("\n", "\n      | "))


T95 = "nan 12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179 2.160 2.145 2.131".split()


def t_interval(values) -> tuple[torch.Tensor, torch.Tensor]:
    """values [S, ...], one per seed -> mean and half width of its 95 % t-interval [...]; NaN for one seed."""
    values = torch.tensor(values, dtype=torch.float64)
    quantile = float(T95[min(len(values), len(T95)) - 1])  # Student's t at 0.975, S - 1 degrees of freedom
    spread = values.std(0, correction=min(1, len(values) - 1))
    return values.mean(0), quantile * spread / math.sqrt(len(values))


def load_run(path: Path) -> dict:
    """The figures of a run's folder, or of one file that eval.py wrote."""

    def read(name: str) -> list[dict]:
        rows = [row for _, row in harness.read_jsonl(path / name if path.is_dir() else path)]
        return [row for row in rows if row.get("reward") is not None]

    rows = read("after-sampled.jsonl")
    if not rows or "question" not in rows[0]:
        raise harness.UserError(f"--compare {path}: expected a run's folder, or a file that eval.py wrote")
    wins = {(row["id"], row["question"]): float(row["reward"] > mosaic.SUCCESS) for row in rows}
    run = summarise(rows) | {"wins": wins, "steps": []}
    if path.is_dir():
        run["accuracy_greedy"] = summarise(read("after-greedy.jsonl"))["accuracy"]
        run["steps"] = read("metrics.jsonl")
        for key in ("rollout", "phi", "credit", "update"):  # with IGPO, credit is the turn-level Phi
            run[f"seconds_{key}"] = fmean(row[f"seconds_{key}"] for row in run["steps"])
        run["seconds_step"] = sum(value for key, value in run.items() if key.startswith("seconds_"))
    return run


def compare(paths: list[str], picture: str) -> None:
    """A table of arms, which are the folders' names without the seed, or of two runs. For two of either, also
    differences paired by seed, an exact McNemar test, and a bootstrap over seeds and questions."""
    arms, pairs = {}, []
    for path in map(Path, tqdm(paths, desc="reading")):
        arm, seed = re.fullmatch(r"(.*?)(-\d+)?", str(path)).groups() if len(paths) > 2 else (str(path), "")
        run = arms.setdefault(arm, {})[seed] = load_run(path)
    titles = [f"{arm} ({len(runs)} seeds)" for arm, runs in arms.items()]
    if len(arms) == 2:
        a, b = arms.values()
        pairs = [(a[seed], b[seed]) for seed in a if seed in b]
        titles.append(f"first - second ({len(pairs)} pairs)")
    print("| | " + " | ".join(titles) + " |\n|" + "---|" * (len(titles) + 1))
    for key in [key for key, value in run.items() if not isinstance(value, (dict, list))]:
        columns = [[run[key] for run in runs.values() if run.get(key) is not None] for runs in arms.values()]
        both = [(x[key], y[key]) for x, y in pairs if x.get(key) is not None and y.get(key) is not None]
        columns += [[x - y for x, y in both]] * (len(arms) == 2)
        cells = ["{:.3f} ± {:.3f}".format(*t_interval(column)) if column else "" for column in columns]
        print(f"| {key} | {' | '.join(cells)} |")
    ids = sorted(set.intersection(*(set(run["wins"]) for pair in pairs for run in pair))) if pairs else []
    if ids:
        gap_SQ = torch.tensor([[x["wins"][id] - y["wins"][id] for id in ids] for x, y in pairs])
        n, smaller = gap_SQ.abs().sum().int().item(), min((gap_SQ > 0).sum(), (gap_SQ < 0).sum()).item()
        p_value = min(1.0, 2 * sum(math.comb(n, k) for k in range(smaller + 1)) / 2**n)
        torch.manual_seed(0)
        picks = [[torch.randint(size, (size,)) for size in gap_SQ.shape] for _ in range(10_000)]
        means = torch.stack([gap_SQ[seeds][:, questions].mean() for seeds, questions in picks])
        low, high = means.quantile(torch.tensor([0.025, 0.975])).tolist()
        print(f"accuracy, first - second: {gap_SQ.mean():+.3f}, bootstrap [{low:+.3f}, {high:+.3f}]")
        print(f"{n} of {gap_SQ.numel()} answers are right in one only, {smaller} of these the rarer way;")
        print(f"McNemar's exact p = {p_value:.2g}, for these checkpoints and not for their seeds")
    if picture:
        plot(arms, picture)


def plot(arms: dict, picture: str) -> None:
    """Learning curves, means over five steps, with their 95 % t-intervals over seeds."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise harness.UserError("--plot: expected matplotlib: pip install matplotlib") from None
    if min(len(run["steps"]) for runs in arms.values() for run in runs.values()) < 5:
        raise harness.UserError("--plot: expected folders of runs of five steps or more")
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="tight")
    for axis, key in zip(axes, ("reward", "sessions")):
        for arm, runs in arms.items():
            columns = zip(*([row[key] for row in run["steps"]] for run in runs.values()))  # steps all have
            mean, half = t_interval(torch.tensor(list(columns)).T.unfold(1, 5, 1).mean(-1).tolist())
            axis.plot(range(4, 4 + len(mean)), mean, label=arm)
            axis.fill_between(range(4, 4 + len(mean)), mean - half, mean + half, alpha=0.2)
        axis.set(xlabel="step", ylabel=f"{key} per trajectory")
    axes[0].legend(fontsize="small")
    figure.savefig(picture, dpi=150)


# ---- The program -------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Config(Limits):
    """Flags of an evaluation. Those of `Limits` and --temperature come from the checkpoint."""

    model: str = HfArg(default="", help="folder or hub id of the policy")
    frozen: str = HfArg(default="", help="the policy that scores the gains; empty: --model")
    tasks: str = HfArg(default="", help="JSONL file of tasks; empty: held-out tasks of the offline world")
    corpus: str = HfArg(default="", help="JSONL file or folder of documents to search; empty: the web")
    search_url: str = HfArg(default="", help="address of Search-R1's /retrieve, to search instead of the web")
    judge_model: str = HfArg(default="", help="judge at API_BASE; empty: deepseek-v4-flash if that is set")
    n: int = HfArg(default=512, help="held-out tasks of the offline world")
    seed: int = HfArg(default=0, help="seed of the sampling")
    temperature: float = HfArg(default=1.0, help="sampling temperature")
    greedy: bool = HfArg(default=False, help="take the likeliest token always")
    out: str = HfArg(default="", help="file for a line a question; empty: in the model's folder")
    show: str = HfArg(default="", help="print the last trajectories of this file and do nothing else")
    last: int = HfArg(default=1, help="how many of them")
    compare: list[str] = HfArg(default_factory=list, help="compare these runs and do nothing else")
    plot: str = HfArg(default="", help="with --compare: draw their learning curves into this .png")


def evaluate(argv: list[str]) -> dict:
    """One rollout per task, and a line for each in --out. -> their summary."""
    config = harness.parse_flags(Config, argv, __doc__)
    saved = Path(config.model) / "mosaic.json"
    if config.model and saved.exists():
        of_the_run = json.loads(saved.read_text())
        keys = [field.name for field in dataclasses.fields(Limits)] + ["temperature"]
        config = harness.parse_flags(Config, [f"--{key}={of_the_run[key]}" for key in keys] + argv, __doc__)
    if not config.model:
        raise harness.UserError("--model: expected the model to evaluate")
    tasks, world = harness.offline_tasks(config.n, 0, "held-out"), harness.open_world(config)
    if config.tasks:
        tasks = harness.load_tasks(config.tasks)
    temperature = 0.0 if config.greedy else config.temperature
    decoding = "sampled" if temperature > 0 else "greedy"
    beside = Path(config.model) if Path(config.model).is_dir() else Path()
    out = Path(config.out or beside / f"eval-{decoding}.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    model, tokenizer = harness.load_policy(config.model)
    chat = harness.Chat(tokenizer)
    engine = harness.HFEngine(model, chat.close[0], temperature, config.seed)
    frozen = harness.load_policy(config.frozen)[0] if config.frozen else model
    trajectories = roll_out(tasks, engine, chat, config, world, decoding)
    score_sessions(frozen, [t for t in trajectories if t.reward is not None], chat)
    rows = [describe(trajectory, chat) for trajectory in trajectories]
    out.unlink(missing_ok=True)
    harness.append_jsonl(out, rows)
    scored = [row for row in rows if row["reward"] is not None]
    if not scored:
        raise harness.UserError("search or judge is down: not one question has a verdict")
    summary = {"decoding": decoding, "seed": config.seed, "file": str(out), **summarise(scored)}
    # The 95 % Wilson interval of a proportion.
    n, p, z = len(scored), summary["accuracy"], 1.96
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    summary["interval"] = [(centre + side) / (1 + z * z / n) for side in (-half, half)]
    return {**summary, "dropped": len(rows) - len(scored)}


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    try:
        config = harness.parse_flags(Config, argv, __doc__)
        if config.show:
            return show(config.show, config.last)
        if config.compare:
            return compare(config.compare, config.plot)
        print(json.dumps(evaluate(argv), indent=1))
    except harness.UserError as error:
        print(f"eval.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
