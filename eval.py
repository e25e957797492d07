"""Evaluation: held-out accuracy, what the sessions were worth, and trajectories for a person to read.

python eval.py --model runs/compaction-mosaic-0/checkpoint            # sampled; add --greedy
python eval.py --show runs/compaction-mosaic-0/trajectories.jsonl     # the credit of each session
"""

import asyncio
import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from statistics import fmean

import torch
from tqdm import tqdm

import harness
import mosaic
import phi
from harness import Limits, Trajectory, option

# ------------------------------------------------------------------------------------ what sessions are worth


def potentials_at(model, trajectories: list[Trajectory], wanted: dict, chat, token_budget: int) -> dict:
    """Phi (M6) of {(trajectory, segment): positions} -> {(trajectory, segment, position): nats per token}."""
    requests = []
    for (i, segment), positions in wanted.items():
        answer = chat.foreign(trajectories[i].task.answer)
        requests.append((trajectories[i].segments[segment].token_ids, positions, answer))
    found = phi.potentials(model, requests, chat.cue, token_budget) if requests else []
    values = {}
    for ((i, segment), positions), phi_P in zip(wanted.items(), found):
        values.update({(i, segment, position): value for position, value in zip(positions, phi_P.tolist())})
    return values


def score_sessions(model, trajectories: list[Trajectory], chat, token_budget: int = 16384) -> None:
    """Write Phi before and after, and the information gain (M7), into every session but the final ones."""
    wanted = {}
    for i, trajectory in enumerate(trajectories):
        for session in trajectory.sessions[:-1]:
            for segment, position in (session.before, session.after):
                wanted.setdefault((i, segment), []).append(position)
    values = potentials_at(model, trajectories, wanted, chat, token_budget)
    for i, trajectory in enumerate(trajectories):
        for session in trajectory.sessions[:-1]:
            session.phi_before = values[i, *session.before]
            session.phi_after = values[i, *session.after]
        before = [session.phi_before for session in trajectory.sessions]
        after = [session.phi_after for session in trajectory.sessions]
        for session, gain in zip(trajectory.sessions, mosaic.information_gain(before, after).tolist()):
            session.gain = gain


def wilson(successes: float, n: int) -> list[float]:
    """95 % Wilson interval of a proportion.

    >>> [round(bound, 3) for bound in wilson(8, 10)]
    [0.49, 0.943]
    """
    z, p = 1.96, successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return [centre - half, centre + half]


def summarise(trajectories: list[Trajectory]) -> dict:
    """The figures of a batch; None where there is nothing to average. Gains are in nats per answer token."""
    t = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    wins = [trajectory for trajectory in t if trajectory.reward > mosaic.SUCCESS]
    losses = [trajectory for trajectory in t if trajectory.reward <= mosaic.SUCCESS]
    paid = [session for trajectory in t for session in trajectory.sessions[:-1]]
    segments = [segment for trajectory in t for segment in trajectory.segments]
    n_sessions = sum(len(trajectory.sessions) for trajectory in t)
    n_tokens = sum(len(segment.token_ids) for segment in segments)

    def average(values):
        values = list(values)
        return fmean(values) if values else None

    row = {
        "n": len(t),
        "reward": average(trajectory.reward for trajectory in t),
        "sessions": average(len(trajectory.sessions) for trajectory in t),
        "sessions_success": average(len(trajectory.sessions) for trajectory in wins),
        "sessions_failure": average(len(trajectory.sessions) for trajectory in losses),
        "positive_ig": average(session.gain > 0 for session in paid),
        "ig_per_session": average(session.gain for session in paid),
    }
    for kind in mosaic.KINDS:
        mine = [session for session in paid if session.kind == kind]
        row[f"sessions_{kind}"] = average(
            sum(s.kind == kind for s in trajectory.sessions) for trajectory in t
        )
        row[f"positive_ig_{kind}"] = average(session.gain > 0 for session in mine)
        row[f"ig_per_session_{kind}"] = average(session.gain for session in mine)
    row["tokens"] = n_tokens / max(1, len(t))
    row["tokens_sampled"] = sum(sum(segment.sampled) for segment in segments) / max(1, len(t))
    row["tokens_per_session"] = n_tokens / max(1, n_sessions)
    row["malformed"] = sum(trajectory.malformed for trajectory in t)
    row["stops"] = dict(Counter(trajectory.stop for trajectory in trajectories))
    return row


# ------------------------------------------------------------------------------------------------ evaluation


def evaluate(
    tasks: list, engine, chat, mode: str, limits: Limits, tools=None, model=None
) -> tuple[dict, list]:
    """One rollout per task. -> (summary with accuracy and its Wilson interval, trajectories).

    `model` scores the sessions' gains; None: they are not scored."""

    async def gather(bar):
        async def one(task):
            trajectory = await harness.rollout(task, engine, chat, mode, limits, tools)
            bar.update()
            return trajectory

        return await asyncio.gather(*[one(task) for task in tasks])

    with tqdm(total=len(tasks), desc="evaluation", leave=False) as bar:
        trajectories = asyncio.run(gather(bar))
    scored = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    if model is not None:
        score_sessions(model, scored, chat)
    successes = sum(trajectory.reward > mosaic.SUCCESS for trajectory in scored)
    interval = wilson(successes, len(scored)) if scored else None
    row = {"accuracy": successes / max(1, len(scored)), "interval": interval, **summarise(trajectories)}
    return row, trajectories


# -------------------------------------------------------------------------------------------------- reading


def describe(trajectory: Trajectory, chat) -> dict:
    """A trajectory as plain data: what is written to trajectories.jsonl."""
    row = {key: getattr(trajectory, key) for key in ("answer", "reward", "stop", "malformed")}
    row |= {
        "question": trajectory.task.question,
        "reference": trajectory.task.answer,
        "id": trajectory.task.id,
    }
    row["sessions"] = []
    for session in trajectory.sessions:
        ids = trajectory.segments[session.segment].token_ids[session.start : session.stop]
        row["sessions"].append({**dataclasses.asdict(session), "text": chat.decode(ids)})
    return row


def show(path: str, n: int) -> None:
    """Print the last `n` trajectories of a file, session by session with their credit."""
    for number, row in harness.read_jsonl(path)[-n:]:
        verdict = "no verdict" if row["reward"] is None else f"reward {row['reward']:g}"
        print(f"\n{'=' * 100}\n{path}:{number}  step {row.get('step', '-')}  task {row['id']}")
        print(
            f"question:  {row['question']}\nreference: {row['reference']}\nanswer:    {row['answer'] or '(none)'}"
        )
        print(f"{verdict}, ended by: {row['stop']}, sessions: {len(row['sessions'])}")
        for j, session in enumerate(row["sessions"], 1):
            final = j == len(row["sessions"])
            print(f"\n--- session {j}: {session['kind']}{' (final: no gain of its own)' if final else ''}")
            if not final:
                print(
                    f"    Phi {session['phi_before']:.3f} -> {session['phi_after']:.3f} nats per answer token"
                )
                print(
                    f"    gain {session['gain']:+.3f}, normalised within its kind {session['normalised']:+.2f}"
                )
            print(f"    advantage {session['advantage']:+.3f}\n")
            print("    " + session["text"].strip().replace("\n", "\n    "))


# ----------------------------------------------------------------------------------------------- the program


@dataclasses.dataclass
class Config(Limits):
    """Flags of an evaluation. Limits and mode come from the checkpoint (mosaic.json) unless a flag is given."""

    model: str = option("", "folder or hub id of the policy")
    mode: str = option("compaction", "single, compaction, subagent or both")
    tasks: str = option("", "JSONL file of tasks; empty: held-out tasks of the offline world")
    corpus: str = option("", "JSONL file or folder of documents for --tasks")
    n: int = option(512, "held-out tasks of the offline world; trajectories that --show prints")
    seed: int = option(0, "seed of the sampling")
    temperature: float = option(1.0, "sampling temperature")
    greedy: bool = option(False, "always take the likeliest token")
    out: str = option("", "file for a line a question; empty: eval-<sampled|greedy>.jsonl beside the model")
    show: str = option("", "print the trajectories of this file, and do nothing else")


def main(argv: list[str] | None = None) -> None:
    parser = harness.flag_parser(Config, {"mode": harness.MODES, "prompts": tuple(harness.PROMPTS)}, __doc__)
    flags = vars(parser.parse_args(argv))
    try:
        if flags.get("show"):
            show(flags["show"], flags.get("n", 4))
        else:
            run(flags)
    except ValueError as error:
        parser.error(str(error))


def run(flags: dict) -> None:
    if not flags.get("model"):
        raise ValueError("--model: expected the folder of a model to evaluate")
    saved = Path(flags["model"]) / "mosaic.json"
    inherited = json.loads(saved.read_text()) if saved.exists() else {}
    names = {f.name for f in dataclasses.fields(Limits)} | {"mode", "temperature"}
    config = Config(**{**{k: v for k, v in inherited.items() if k in names}, **flags})
    if config.tasks:
        tasks = harness.load_tasks(config.tasks)
        if not config.corpus:
            raise ValueError("--corpus: expected a file or folder of documents to search in for --tasks")
        tools = harness.Corpus(harness.load_corpus(config.corpus), config.top_k)
    else:
        tasks, tools = harness.offline_tasks(config.n, 0, "held-out"), None
    model, tokenizer = harness.load_policy(config.model)
    chat = harness.make_chat(tokenizer)
    temperature = 0.0 if config.greedy else config.temperature
    engine = harness.HFEngine(model, chat.close[0], temperature, config.seed)
    summary, trajectories = evaluate(tasks, engine, chat, config.mode, config, tools, model)
    name = "greedy" if config.greedy else "sampled"
    out = Path(config.out or f"{config.model}/eval-{name}.jsonl")
    with out.open("w", encoding="utf-8") as file:
        for trajectory in trajectories:
            file.write(json.dumps(describe(trajectory, chat), ensure_ascii=False) + "\n")
    print(json.dumps({"decoding": name, "seed": config.seed, "file": str(out), **summary}, indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1 if not torch.cuda.is_available() else torch.get_num_threads())
    main()
