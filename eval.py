"""Evaluation: held-out accuracy, what the sessions were worth, and trajectories for a person to read.
Left out on purpose: pass@k, majority votes, the scorers of other benchmarks.

    python eval.py --model runs/compaction-mosaic-0/checkpoint            # sampled; or --greedy
    python eval.py --show runs/compaction-mosaic-0/trajectories.jsonl     # the credit of each session
"""

import asyncio
import dataclasses
import json
import math
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
def roll_out(tasks: list, engine, chat, limits: Limits, tools=None, progress: str = "") -> list[Trajectory]:
    """One rollout per task, all at once; `progress` names the bar that counts them."""

    async def all_of_them():
        with tqdm(total=len(tasks), desc=progress, leave=False, disable=not progress) as bar:
            rollouts = [harness.rollout(task, engine, chat, limits=limits, tools=tools) for task in tasks]
            jobs = [asyncio.create_task(one) for one in rollouts]
            for job in jobs:
                job.add_done_callback(lambda _: bar.update())
            return await asyncio.gather(*jobs)

    return asyncio.run(all_of_them())


def potentials_at(model, trajectories: list[Trajectory], places: list, chat, token_budget: int) -> dict:
    """Phi (M6) at places (i, segment, position) of trajectories[i] -> {place: nats per answer token}."""
    positions = {}
    for i, segment, position in places:
        positions.setdefault((i, segment), []).append(position)
    requests = []
    for (i, segment), positions_P in positions.items():
        answer = chat.foreign(trajectories[i].reference)
        requests.append((trajectories[i].segments[segment].token_ids, positions_P, answer))
    values = {}
    found = phi.potentials(model, requests, chat.cue, token_budget)
    for (key, positions_P), phi_P in zip(positions.items(), found):
        values |= {(*key, position): value for position, value in zip(positions_P, phi_P.tolist())}
    return values


def score_sessions(model, trajectories: list[Trajectory], chat, token_budget: int = 16384) -> None:
    """Write Phi before and after it, and its information gain (M7), into every session but the final ones."""
    paid = [(i, session) for i, t in enumerate(trajectories) for session in t.sessions[:-1] if t.reference]
    places = [(i, *place) for i, session in paid for place in (session.before, session.after)]
    values = potentials_at(model, trajectories, places, chat, token_budget)
    for i, session in paid:
        session.phi_before, session.phi_after = values[i, *session.before], values[i, *session.after]
    for t in trajectories:
        before, after = ([getattr(s, key) for s in t.sessions] for key in ("phi_before", "phi_after"))
        for session, gain in zip(t.sessions, mosaic.information_gain(before, after).tolist()):
            session.gain = gain


def score_forks(model, trajectories: list[Trajectory], chat, token_budget: int = 16384) -> None:
    """Ours, for the forks in place of M7: Phi at the end with and without what the fork returned."""
    forks = [(t, s) for t in trajectories for s in t.sessions if s.kind == "subagent" and t.reference]
    requests = []
    for t, fork in forks:
        segment, merges = fork.before[0], [s.after for s in t.sessions if s.kind == "subagent"]
        # The end is where the policy began its last turn, and so before it states the answer.
        end = max(t.segments[segment].turns[-1], *(stop for index, stop in merges if index == segment))
        ids, answer = t.segments[segment].token_ids[:end], chat.foreign(t.reference)
        without = ids[: fork.before[1]] + chat.response(chat.own(harness.NO_RESULT)) + ids[fork.after[1] :]
        requests += [(ids, [len(ids)], answer), (without, [len(without)], answer)]
    values = torch.cat(phi.potentials(model, requests, chat.cue, token_budget) or [torch.zeros(0)])
    gains = mosaic.counterfactual_gain(values[::2], values[1::2]).tolist() if forks else []
    for (_, fork), phi_after, phi_before, gain in zip(
        forks, values[::2].tolist(), values[1::2].tolist(), gains
    ):
        fork.phi_before, fork.phi_after, fork.gain = phi_before, phi_after, gain


def wilson(successes: float, n: int) -> list[float]:
    """95 % Wilson interval of a proportion."""
    z, p = 1.96, successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return [centre - half, centre + half]


def describe(trajectory: Trajectory, chat) -> dict:
    """A trajectory as plain data: a line of trajectories.jsonl and of eval-sampled.jsonl."""
    task = trajectory.task
    row = {"id": task.id, "question": task.question, "reference": task.answer}
    row |= {key: getattr(trajectory, key) for key in ("answer", "reward", "stop", "malformed")}
    row |= {"tokens": sum(len(segment.token_ids) for segment in trajectory.segments), "sessions": []}
    for session in trajectory.sessions:
        ids = trajectory.segments[session.segment].token_ids[session.start : session.stop]
        row["sessions"].append({**dataclasses.asdict(session), "text": chat.decode(ids)})
    return row


def kept_facts(row: dict) -> list[tuple[int, int]]:
    """(facts stated, those of them that lead to the answer) of each summary; the offline world's only."""
    summaries = [s["text"].rsplit("assistant\n", 1)[-1] for s in row["sessions"] if s["kind"] == "compact"]
    stated, useful = map(harness.FACT.findall, summaries), harness.chain_of(row["question"], row["reference"])
    return [(len(set(facts)), len(useful & set(facts))) for facts in stated] if useful else []


def summarise(rows: list[dict]) -> dict:
    """Figures of described trajectories that have a reward; None where there is none. Gains: nats a token."""
    paid = [session for row in rows for session in row["sessions"][:-1]]
    facts = [pair for row in rows for pair in kept_facts(row)]
    n_sessions = sum(len(row["sessions"]) for row in rows)

    def average(values) -> float | None:
        values = list(values)
        return fmean(values) if values else None

    result = {
        "n": len(rows),
        "reward": average(row["reward"] for row in rows),
        "sessions": n_sessions / len(rows),
        "sessions_success": average(len(r["sessions"]) for r in rows if r["reward"] > mosaic.SUCCESS),
        "sessions_failure": average(len(r["sessions"]) for r in rows if r["reward"] <= mosaic.SUCCESS),
        "facts_kept": average(useful for _, useful in facts),  # of the offline world, per summary
        "facts_precision": average(useful / stated for stated, useful in facts if stated),
        "positive_ig": average(session["gain"] > 0 for session in paid),
        "ig_per_session": average(session["gain"] for session in paid),
        "tokens": average(row["tokens"] for row in rows),
        "tokens_per_session": sum(row["tokens"] for row in rows) / n_sessions,
        "malformed": sum(row["malformed"] for row in rows),
        "stops": dict(Counter(row["stop"] for row in rows)),
    }
    for kind in mosaic.KINDS:
        mine = [session for session in paid if session["kind"] == kind]
        result[f"sessions_{kind}"] = sum(s["kind"] == kind for r in rows for s in r["sessions"]) / len(rows)
        result[f"positive_ig_{kind}"] = average(session["gain"] > 0 for session in mine)
        result[f"ig_per_session_{kind}"] = average(session["gain"] for session in mine)
    return result


def evaluate(tasks: list, engine, chat, limits: Limits, tools, model, out: Path) -> dict:
    """One rollout per task, a line each in the file `out`; `model` scores the gains. -> their summary."""
    trajectories = roll_out(tasks, engine, chat, limits, tools, "evaluation")
    score_sessions(model, [t for t in trajectories if t.reward is not None], chat)
    rows = [describe(trajectory, chat) for trajectory in trajectories]
    out.unlink(missing_ok=True)
    harness.append_jsonl(out, rows)
    scored = [row for row in rows if row["reward"] is not None]
    if not scored:
        raise harness.UserError("search or judge is down: not one question has a verdict")
    wins = sum(row["reward"] > mosaic.SUCCESS for row in scored)
    row = {"accuracy": wins / len(scored), "interval": wilson(wins, len(scored)), **summarise(scored)}
    return {**row, "dropped": len(rows) - len(scored)}


# ---- Reading -----------------------------------------------------------------------------------------------
def show(path: str, n: int) -> None:
    """Print the last n trajectories of a file, session by session with their credit."""
    for where, row in harness.read_jsonl(path)[-n:]:
        if "sessions" not in row:
            raise harness.UserError(f"--show {where}: expected a trajectory, as in trajectories.jsonl")
        print("=" * 100, f"\n{where}  step {row.get('step', '-')}, task {row['id']}", sep="")
        for key in ("question", "reference", "answer"):
            print(f"{key + ':':<11}{row[key] or '(none)'}")
        print(f"reward {row['reward']}, ended by: {row['stop']}, sessions: {len(row['sessions'])}\n")
        for j, session in enumerate(row["sessions"], 1):
            print("--- session {}, {kind}, advantage {advantage:+.3f}".format(j, **session))
            credit = "Phi {phi_before:.3f} -> {phi_after:.3f} nats per answer token, gain {gain:+.3f}, "
            credit = (credit + "within its kind {normalised:+.2f}").format(**session)
            print("    " + (credit if j < len(row["sessions"]) else "final: no gain of its own"))
            print("      | " + session["text"].strip().replace("\n", "\n      | "), end="\n\n")


# ---- The program -------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Config(Limits):
    """Flags of an evaluation. Those of `Limits` and --temperature come from the checkpoint."""

    model: str = HfArg(default="", help="folder or hub id of the policy")
    tasks: str = HfArg(default="", help="JSONL file of tasks; empty: held-out tasks of the offline world")
    corpus: str = HfArg(default="", help="JSONL file or folder of documents to search for --tasks")
    n: int = HfArg(default=512, help="held-out tasks of the offline world")
    seed: int = HfArg(default=0, help="seed of the sampling")
    temperature: float = HfArg(default=1.0, help="sampling temperature")
    greedy: bool = HfArg(default=False, help="take the likeliest token always")
    out: str = HfArg(default="", help="file for a line a question; empty: beside the model")
    show: str = HfArg(default="", help="print the last trajectories of this file and do nothing else")
    last: int = HfArg(default=1, help="how many of them")


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    try:
        config = harness.parse_flags(Config, argv, __doc__)
        show(config.show, config.last) if config.show else run(config, argv)
    except harness.UserError as error:
        print(f"eval.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run(config: Config, argv: list[str]) -> None:
    saved = Path(config.model) / "mosaic.json"
    if config.model and saved.exists():
        of_the_run = json.loads(saved.read_text())
        of_the_run["mode"] = of_the_run.get("eval_mode", of_the_run["mode"])
        keys = [field.name for field in dataclasses.fields(Limits)] + ["temperature"]
        flags = [f"--{key}={of_the_run[key]}" for key in keys if key in of_the_run]
        config = harness.parse_flags(Config, flags + argv, __doc__)
    if not config.model or bool(config.tasks) != bool(config.corpus):
        raise harness.UserError("expected --model, and --tasks and --corpus both or neither")
    tasks, tools = harness.offline_tasks(config.n, 0, "held-out"), None
    if config.tasks:
        tasks = harness.load_tasks(config.tasks)
        tools = harness.Corpus(harness.load_corpus(config.corpus), config.top_k)
    temperature = 0.0 if config.greedy else config.temperature
    decoding = "sampled" if temperature > 0 else "greedy"
    beside = config.model if Path(config.model).is_dir() else "."
    out = Path(config.out or f"{beside}/eval-{decoding}.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    model, tokenizer = harness.load_policy(config.model)
    chat = harness.Chat(tokenizer)
    engine = harness.HFEngine(model, chat.close[0], temperature, config.seed)
    summary = evaluate(tasks, engine, chat, config, tools, model, out)
    print(json.dumps({"decoding": decoding, "seed": config.seed, "file": str(out), **summary}, indent=1))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    main()
