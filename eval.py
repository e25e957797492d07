"""Evaluation: accuracy with its interval, what sessions were worth, trajectories to read, arms to compare.
python eval.py --model runs/compaction-mosaic-0/checkpoint            # sampled; or --greedy
python eval.py --show runs/compaction-mosaic-0/trajectories.jsonl     # the credit of each session
python eval.py --compare runs/compaction-mosaic-* runs/compaction-broadcast-*
"""

import asyncio
import json
import math
import runpy
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch

import harness
import mosaic
import phi
from harness import HfArg, Limits, Setup, expect, require


# ---- Trajectories as plain data ----------------------------------------------------------------------------
def describe(trajectory, chat):
    """A line of trajectories.jsonl and of an evaluation."""
    task = trajectory.task
    row = {"id": task.id, "question": task.question, "reference": task.answer}
    row |= {key: getattr(trajectory, key) for key in ("answer", "reward", "stop", "malformed")}
    row |= {"tokens": sum(len(segment.token_ids) for segment in trajectory.segments), "sessions": []}
    for session in trajectory.sessions:
        ids = trajectory.segments[session.segment].token_ids[session.start : session.stop]
        row["sessions"].append({**asdict(session), "text": chat.decode(ids)})
    return row


def average(values):
    return fmean(values) if values else None


def summarise(rows):
    """Figures of described trajectories with a reward. Gains in nats a token; None: nothing to average."""
    wins = [row for row in rows if row["reward"] > mosaic.SUCCESS]
    losses = [row for row in rows if row["reward"] <= mosaic.SUCCESS]
    scored = [session for row in rows for session in row["sessions"][:-1] if session["gain"] is not None]
    figures = {"n": len(rows), "accuracy": len(wins) / len(rows)}
    for key in ("reward", "tokens", "malformed"):
        figures[key] = average([row[key] for row in rows])
    for name, part in (("sessions", rows), ("sessions_success", wins), ("sessions_failure", losses)):
        figures[name] = average([len(row["sessions"]) for row in part])
    for suffix in ("", "_normal", "_compact", "_subagent"):
        gains = [session["gain"] for session in scored if suffix in ("", f"_{session['kind']}")]
        figures[f"positive_ig{suffix}"] = average([gain > 0 for gain in gains])
        figures[f"ig_per_session{suffix}"] = average(gains)
    figures["tokens_per_session"] = figures["tokens"] / figures["sessions"]
    return figures | {"stops": dict(Counter(row["stop"] for row in rows))}


# ---- Evaluation --------------------------------------------------------------------------------------------
def score_gains(model, trajectories, cue, **options):
    """Write Phi (M6) around every session but the final ones, and the gain (M7) of all, 0 without Phi."""
    phi.score_sessions(model, trajectories, cue, **options)
    for trajectory in trajectories:
        before = [session.phi_before or 0.0 for session in trajectory.sessions]  # the final one has none
        after = [session.phi_after or 0.0 for session in trajectory.sessions]
        for session, gain in zip(trajectory.sessions, mosaic.information_gain(before, after).tolist()):
            session.gain = gain


def evaluate(tasks, engine, chat, config, world, out, scorer=None, batch=512, wake=lambda: None):
    """A rollout and a line of `out` for each task that has none with a reward there -> the figures of all.
    world: (tools, judge). scorer: whose Phi gives the gains, or None. wake() gives the engine its weights."""
    old = harness.read_jsonl(out) if out.exists() else []
    rows = {row["id"]: row for _, row in old if row["reward"] is not None}
    left = [task for task in tasks if task.id not in rows]
    for start in range(0, len(left), batch):
        wake()
        engine.reseed(config.seed + start)
        trajectories = harness.roll_out(left[start : start + batch], engine, chat, config, *world, out.stem)
        engine.sleep()
        try:
            if scorer is not None:
                scored = [trajectory for trajectory in trajectories if trajectory.reward is not None]
                score_gains(scorer, scored, chat.cue, token_budget=config.token_budget)
        finally:  # hours of rollouts are not lost with a failure of Phi
            lines = [describe(trajectory, chat) for trajectory in trajectories]
            harness.append_jsonl(out, lines)
        rows |= {row["id"]: row for row in lines}
    judged = [rows[task.id] for task in tasks if rows[task.id]["reward"] is not None]
    expect(judged, f"{out}: search or judge is down, no answer has a verdict")
    figures = summarise(judged)
    n, p, z = len(judged), figures["accuracy"], 1.96  # the 95 % Wilson interval of a proportion
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    figures["interval"] = [(p + z * z / (2 * n) + side) / (1 + z * z / n) for side in (-half, half)]
    limits = {name: getattr(config, name) for name in vars(Limits())}
    return {"dropped": len(tasks) - n, **figures, "limits": limits}


def check_paths(model, chat, engine, config, task):
    """Log-probs of some drawn tokens by the engine, phi.py and the model itself. UserError: they differ."""
    probe = harness.HFEngine(model, config) if config.engine == "hf" else engine  # it holds this very model
    probe.temperature = 1.0
    prompt = chat.main_prompt(config, task.question)
    drawn, engine_logprobs, _ = asyncio.run(probe.generate(prompt, min(24, config.max_turn_tokens), []))
    ids = torch.tensor([prompt + drawn], device=model.device)
    with torch.no_grad():
        own_T = model(ids).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu()
        phi_T = phi.token_logprobs(model, ids.tolist())[0].cpu()
    for way, row_T in (("phi.py", phi_T), ("the engine", torch.tensor(engine_logprobs))):
        gap = (row_T[-len(drawn) :] - own_T[-len(drawn) :]).abs().mean().item()
        known = "known causes: a head that scales or caps, an inexact cache, weights that the engine packs"
        sentence = f"--model {config.model}: {way} and the model differ by {gap:.2g} nats a token ({known})"
        expect(gap < (0.15 if torch.cuda.is_available() else 2e-4), sentence)  # bfloat16 on a GPU


# ---- The program -------------------------------------------------------------------------------------------
@dataclass
class Config(Setup):  # flags of an evaluation
    like: str = HfArg(default="", help="folder of a run whose settings to take; empty: the run of --model")
    n: int = HfArg(default=512, help="held-out tasks of the offline world; of --tasks, how many at a time")
    resume: bool = HfArg(default=False, help="keep the answers in --out and ask the other questions only")
    greedy: bool = HfArg(default=False, help="take the likeliest token always")
    out: str = HfArg(default="", help="file for a line a question; empty: eval-sampled.jsonl, or -greedy")
    show: str = HfArg(default="", help="print a trajectory of this file and do nothing else")
    line: int = HfArg(default=0, help="which one; 0: the last of those with the most sessions")
    compare: list[str] = HfArg(default_factory=list, help="print a table of these runs and do nothing else")


def make_config(given):
    """Your flags, before the settings of a run, before the sizes of the world or of tasks of one's own."""
    values = harness.values_of("own" if given.get("tasks") else "toy", given.get("mode", "compaction"))
    run = Path(given.get("model", ""), "mosaic.json")
    if "like" in given:
        run = Path(given["like"], "config.json")
        expect(run.exists(), f"--like {given['like']}: expected the folder of a run")
    if run.exists():
        values = json.loads(run.read_text())
    values = {name: value for name, value in values.items() if name in vars(Setup())}
    return Config(**{**values, **given})


def run(argv):
    given = harness.parse_flags(Config, argv, __doc__)
    if "show" in given or "compare" in given:  # what a person needs, and no run does
        read = runpy.run_path(str(Path(__file__).parent / ".tools/reading.py"))
        line = given.get("line", 0)
        return read["compare"](given["compare"]) if "compare" in given else read["show"](given["show"], line)
    config = make_config(given)
    world = harness.open_world(config)
    offline = harness.WORLD / "held-out.jsonl"
    tasks = harness.load_tasks(config.tasks) if config.tasks else harness.load_tasks(offline)[: config.n]
    if config.resume:
        require(config, "out", config.out, "the file of answers to go on with")
    decoding = "greedy" if config.greedy else "sampled"
    out = Path(config.out) if config.out else Path(f"eval-{decoding}.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model, chat = harness.load_policy(harness.policy_of(config), config.max_context, dtype)
    for task in tasks:
        config.room(chat, task)  # UserError: it does not fit
    if out.exists() and not config.resume:
        out.rename(f"{out}.old")
    engine = harness.ENGINES[config.engine](model, config)
    weights = [*model.named_parameters()]
    engine.load_weights(weights)
    check_paths(model, chat, engine, config, tasks[0])
    engine.temperature = 0.0 if config.greedy else config.temperature
    shared = (engine, chat, config, world, out, model, config.n)
    figures = evaluate(tasks, *shared, wake=lambda: engine.load_weights(weights))
    print(json.dumps({"decoding": decoding, "seed": config.seed, "file": str(out), **figures}, indent=1))


def main(argv=None):
    harness.run_program("eval.py", lambda: run(argv))


if __name__ == "__main__":
    main()
