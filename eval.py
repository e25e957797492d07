"""Evaluation: held-out accuracy, what the sessions were worth, and trajectories to read.
Left out on purpose: pass@k, majority votes, the scorers of other benchmarks.
    python eval.py --model runs/compaction-mosaic-0/checkpoint            # sampled; or --greedy
    python eval.py --show runs/compaction-mosaic-0/trajectories.jsonl     # the credit of each session
"""

import asyncio
import dataclasses
import json
import math
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm.asyncio import tqdm

import harness
import mosaic
import phi
from harness import HfArg, Limits, Setup, Trajectory, expect, load_tasks, offline_tasks

ENGINES = {"hf": harness.HFEngine, "vllm": harness.VLLMEngine}
if not torch.cuda.is_available():
    torch.set_num_threads(1)  # on a busy machine, two are several times slower than one


# ---- Rollouts and what their sessions are worth ------------------------------------------------------------
def roll_out(tasks: list, engine, chat, limits: Limits, world=(), progress: str = "") -> list[Trajectory]:
    """One rollout per task, all at once, with world (tools, judge); `progress` names the bar."""

    async def all_of_them():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(256))  # most of them wait
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the first error is enough
        rollouts = [harness.rollout(task, engine, chat, "", limits, *world) for task in tasks]
        jobs = map(asyncio.create_task, rollouts)  # here, since gather starts them in any order
        return await tqdm.gather(*jobs, desc=progress, leave=False, disable=not progress)

    return asyncio.run(all_of_them())


def potentials_at(model, places: list, chat, token_budget: int) -> list[float]:
    """Phi (M6), in nats per answer token, at places (trajectory, segment, position)."""
    requests = [(t.segments[segment].token_ids, p, chat.foreign(t.task.answer)) for t, segment, p in places]
    return phi.potentials(model, requests, chat.cue, token_budget).tolist()


def score_sessions(model, trajectories: list[Trajectory], chat, token_budget: int = 16384) -> None:
    """Write Phi before and after it, and its information gain (M7), into every session but the final ones."""
    places = [(t, *at) for t in trajectories for s in t.sessions[:-1] for at in (s.before, s.after)]
    values = iter(potentials_at(model, places, chat, token_budget))
    for t in trajectories:
        for session in t.sessions[:-1]:
            session.phi_before, session.phi_after = next(values), next(values)
        phi_2N = torch.tensor([(session.phi_before, session.phi_after) for session in t.sessions]).T
        phi_2N[:, ~phi_2N.isfinite().all(0)] = 0  # where one is not finite, there is no gain to speak of
        for session, gain in zip(t.sessions, mosaic.information_gain(*phi_2N).tolist()):
            session.gain = gain


def describe(t: Trajectory, chat) -> dict:
    """A trajectory as plain data: a line of trajectories.jsonl and of an evaluation."""
    row = {"id": t.task.id, "question": t.task.question, "reference": t.task.answer}
    row |= {key: getattr(t, key) for key in ("answer", "reward", "stop", "malformed")}
    row |= {"tokens": sum(len(segment.token_ids) for segment in t.segments), "sessions": []}
    for session in t.sessions:
        ids = t.segments[session.segment].token_ids[session.start : session.stop]
        row["sessions"].append({**dataclasses.asdict(session), "text": chat.decode(ids)})
    return row


def summarise(rows: list[dict]) -> dict:
    """Figures of described trajectories that have a reward; None where there is none. Gains: nats a token."""

    def average(values) -> float | None:
        return sum(values) / len(values) if (values := list(values)) else None

    wins = [row for row in rows if row["reward"] > mosaic.SUCCESS]
    losses = [row for row in rows if row["reward"] <= mosaic.SUCCESS]
    paid = [session for row in rows for session in row["sessions"][:-1]]
    reward = average(row["reward"] for row in rows)
    figures = {"n": len(rows), "accuracy": len(wins) / len(rows), "reward": reward}
    for name, some in (("success", wins), ("failure", losses)):
        figures[f"sessions_{name}"] = average(len(row["sessions"]) for row in some)
    for kind in ("", *mosaic.KINDS):  # "": of any kind
        some, key = [s for s in paid if kind in ("", s["kind"])], kind and f"_{kind}"
        figures[f"sessions{key}"] = average(sum(kind in ("", s["kind"]) for s in r["sessions"]) for r in rows)
        figures[f"positive_ig{key}"] = average(session["gain"] > 0 for session in some)
        figures[f"ig_per_session{key}"] = average(session["gain"] for session in some)
    figures["tokens"] = average(row["tokens"] for row in rows)
    figures["tokens_per_session"] = figures["tokens"] / figures["sessions"]
    figures["malformed"] = sum(row["malformed"] for row in rows)
    return {**figures, "stops": dict(Counter(row["stop"] for row in rows))}


# ---- Reading -----------------------------------------------------------------------------------------------
def show(path: str, n: int) -> None:
    """Print the last n trajectories of a file, session by session with their credit."""
    credit = "Phi {phi_before:.3f} -> {phi_after:.3f}, gain {gain:+.3f} nats, {normalised:+.2f} in its kind"
    for where, row in harness.read_jsonl(path)[-n:]:
        expect({"question", "sessions"} <= row.keys(), f"--show {where}: expected a line of a trajectory")
        print("=" * 100, where, sep="\n")
        for key in ("question", "reference", "answer", "reward", "stop"):
            print(f"{key + ':':<11}{row[key]}")
        for j, session in enumerate(row["sessions"], 1):
            print("\n--- session {}, {kind}, advantage {advantage:+.3f}".format(j, **session))
            print("    final: no gain" if j == len(row["sessions"]) else "    " + credit.format(**session))
            print("      | " + session["text"].strip().replace("\n", "\n      | "))


# ---- The program -------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Config(Setup):
    """Flags of an evaluation. Those of `Limits` and --temperature come from the checkpoint."""

    frozen: str = HfArg(default="", help="the policy that scores the gains; empty: --model")
    n: int = HfArg(default=512, help="held-out tasks of the offline world; of --tasks, how many at a time")
    resume: bool = HfArg(default=False, help="keep the answers in --out and ask the other questions only")
    greedy: bool = HfArg(default=False, help="take the likeliest token always")
    out: str = HfArg(default="", help="file for a line a question; empty: eval-sampled.jsonl, or -greedy")
    show: str = HfArg(default="", help="print the last trajectories of this file and do nothing else")
    last: int = HfArg(default=1, help="how many of them")


def evaluate(argv: list[str]) -> dict:
    """One rollout per task, and a line for each in --out. -> their summary."""
    config = harness.parse_flags(Config, argv, __doc__)
    expect(config.n > 0 < config.temperature, "--n, --temperature: expected numbers above 0")
    saved = Path(config.model) / "mosaic.json"
    if saved.exists():
        of_the_run = json.loads(saved.read_text())
        of_the_run["mode"] = of_the_run["eval_mode"]
        flags = [f"--{key}={of_the_run[key]}" for key in (*vars(Limits()), "temperature")]
        config = harness.parse_flags(Config, flags + argv, __doc__)
    world = harness.open_world(config)
    tasks = load_tasks(config.tasks) if config.tasks else offline_tasks(config.n, 0, "held-out")
    decoding, temperature = ("greedy", 0.0) if config.greedy else ("sampled", config.temperature)
    out = Path(config.out or f"eval-{decoding}.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    model, chat = harness.load_policy(config.model, tasks, config)
    engine = ENGINES[config.engine](model, config, temperature)
    frozen = harness.load_policy(config.frozen)[0] if config.frozen else model
    answered, mark = set(), {"model": config.model, "temperature": temperature}
    if config.resume and out.exists() and b"\n" in out.read_bytes():
        os.truncate(out, out.read_bytes().rfind(b"\n") + 1)  # without a line that a kill has torn
        rows = [row for _, row in harness.read_jsonl(out) if row | mark == row and row["reward"] is not None]
        answered = {(row["id"], row["question"], row["reference"]) for row in rows}
    elif out.exists():
        out.rename(f"{out}.old")
    left = [task for task in tasks if (task.id, task.question, task.answer) not in answered]
    for k in range(0, len(left), config.n):
        engine.load_weights(model.named_parameters())
        engine.reseed(config.seed + k)
        trajectories = roll_out(left[k : k + config.n], engine, chat, config, world, decoding)
        engine.sleep()
        score_sessions(frozen, [t for t in trajectories if t.reward is not None], chat)
        harness.append_jsonl(out, [mark | describe(trajectory, chat) for trajectory in trajectories])
    last = {row.get("id"): row for _, row in harness.read_jsonl(out)}
    rows = [last[task.id] for task in tasks if task.id in last]
    scored = [row for row in rows if row["reward"] is not None]
    judged = any(row["answer"] for row in scored) or len(scored) == len(rows)
    expect(judged, "search or judge is down: no answer has a verdict")
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
        print(json.dumps(evaluate(argv), indent=1))
    except (harness.UserError, OSError) as error:
        print(f"eval.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
