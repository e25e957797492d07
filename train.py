"""Synchronous GRPO over sets of sessions, with Mosaic's credit. One step of training, in the main loop below:
    tasks -> rollouts -> Phi -> gains -> one advantage per session -> per token -> policy loss -> sync

Left out on purpose: a critic, a reward model, a KL penalty, entropy bonuses, rollouts that overlap training.
    python train.py --mode compaction            # offline world and tiny model: no GPU, no download
    python train.py --mode compaction --model DIR --tasks my.jsonl --corpus docs/
"""

import dataclasses
import json
import os
import random
import shutil
import sys
import time
import zlib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm
from transformers.hf_argparser import HfArg

import harness
import mosaic
import phi
from eval import describe, evaluate, potentials_at, roll_out, score_forks, score_sessions, summarise
from harness import Limits, Trajectory


# ---- Config ------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Config(Limits):
    """One run. The fields are the flags; those of `Limits` (harness.py) come first."""

    preset: Literal["toy", "paper"] = HfArg(default="toy", help="where the flags start from")
    advantage: Literal["mosaic", "broadcast", "igpo"] = HfArg(default="mosaic", help="the credit")
    session_aware: bool = HfArg(default=True, help="trajectory level of Mosaic, M4 and M5; without it M1")
    shaping: bool = HfArg(default=True, help="session level of Mosaic, M7 to M10")
    fork_credit: Literal["immediate", "counterfactual"] = HfArg(default="immediate", help="gain of a fork")
    reference: Literal["task", "group"] = HfArg(default="task", help="the answer that Phi asks for")
    model: str = HfArg(default="", help="folder or hub id of the policy; empty: the tiny offline one")
    engine: Literal["hf", "vllm"] = HfArg(default="hf", help="what generates")
    tasks: str = HfArg(default="", help="JSONL file of tasks; empty: the offline world")
    corpus: str = HfArg(default="", help="JSONL file or folder of documents to search; empty: the web")
    search_url: str = HfArg(default="", help="address of Search-R1's /retrieve, to search instead of the web")
    judge_model: str = HfArg(default="", help="judge at API_BASE; empty: deepseek-v4-flash if that is set")
    steps: int = HfArg(default=50, help="steps: a batch of rollouts and its updates each")
    seed: int = HfArg(default=0, help="seed of tasks, sampling and minibatches")
    out: str = HfArg(default="", help="folder of the run; empty: runs/MODE-ADVANTAGE-SEED")
    resume: bool = HfArg(default=False, help="go on from the checkpoint in the folder of the run")
    checkpoint_every: int = HfArg(default=10, help="steps between checkpoints")
    tasks_per_step: int = HfArg(default=2, help="tasks of a step")
    group_size: int = HfArg(default=4, help="trajectories per task, G")
    rho: float = HfArg(default=0.2, help="strength of the session-count signal (M4), 0 <= rho < 1")
    beta0: float = HfArg(default=0.1, help="fallback of all-failure groups (M5)")
    beta1: float = HfArg(default=0.2, help="fallback of all-success groups (M5)")
    lam: float = HfArg(default=0.1, help="weight of the information gain, lambda (M11)")
    clip_low: float = HfArg(default=0.2, help="clip of the importance ratio below 1 (M12)")
    clip_high: float = HfArg(default=0.2, help="clip of the importance ratio above 1 (M12)")
    minibatches: int = HfArg(default=2, help="optimizer steps per batch, however many sessions it has")
    lr: float = HfArg(default=1e-6, help="learning rate, constant")
    temperature: float = HfArg(default=1.0, help="sampling temperature, at which log-probs are taken too")
    token_budget: int = HfArg(default=16384, help="padded tokens of one forward, in Phi and in the update")
    eval_tasks: int = HfArg(default=0, help="held-out tasks of the offline world, before and after")
    eval_mode: str = HfArg(default="", help="mode of the warm start and of evaluation, if not --mode")
    warm_start_steps: int = HfArg(default=0, help="steps of behaviour cloning before RL, offline world")


# A preset is the flags that stand before yours. In tiny contexts, what a summary keeps decides what follows.
PRESETS = {
    "toy": """--prompts offline --max-context 220 --max-turn-tokens 24 --max-response-tokens 44
        --max-summary-tokens 14 --max-turns 14 --max-subagent-turns 3 --max-calls 16 --max-parallel-calls 2
        --top-k 2 --tasks-per-step 8 --group-size 8 --minibatches 4 --lr 4e-4 --steps 60 --eval-tasks 256
        --warm-start-steps 500""",
    "paper": """--model Qwen/Qwen3.5-4B --engine vllm --max-context 131072 --max-turn-tokens 8192
        --max-response-tokens 16384 --max-summary-tokens 4096 --max-turns 100 --max-subagent-turns 30
        --max-sessions 17 --max-calls 200 --max-parallel-calls 4 --tasks-per-step 16 --group-size 8 --steps 62
        --token-budget 131072""",
}


def make_config(argv: list[str]) -> Config:
    """The preset's flags, then yours. UserError: a value that makes no sense."""
    config = harness.parse_flags(Config, argv, __doc__)
    if config.preset == "paper" or not config.tasks:
        # Tasks of one's own start from the fields' defaults, which suit a small model.
        config = harness.parse_flags(Config, PRESETS[config.preset].split() + argv, __doc__)
    config.eval_mode = config.eval_mode or config.mode
    config.out = config.out or f"runs/{config.mode}-{config.advantage}-{config.seed}"
    n_trajectories = config.tasks_per_step * config.group_size
    for flag, holds, expected in (
        ("--rho", 0 <= config.rho < 1, "0 <= rho < 1"),
        ("--lam, --beta0, --beta1", min(config.lam, config.beta0, config.beta1) >= 0, "numbers from 0"),
        ("--group-size", config.group_size >= 2, "2 or more trajectories to compare"),
        ("--steps, --checkpoint-every", min(config.steps, config.checkpoint_every) >= 1, "1 or more"),
        ("--minibatches", 1 <= config.minibatches <= n_trajectories, "1 to the trajectories of a step"),
        ("--compact-at", 0 < config.compact_at <= 1, "a part of the context, 0 < f <= 1"),
        ("--temperature", config.temperature > 0, "a number above 0"),
        ("--model", bool(config.model) or not config.tasks, "a model that can read --tasks"),
        ("--reference", config.reference == "task" or config.advantage != "igpo", "task for igpo"),
        ("--engine", config.engine == "hf", "hf; vllm is not built yet"),
    ):
        if not holds:
            raise harness.UserError(f"{flag}: expected {expected}")
    return config


# ---- Warm start --------------------------------------------------------------------------------------------
def warm_start(config: Config) -> str:
    """The folder of the tiny model after behaviour cloning of the scripted agent, made unless it is there."""
    keys = [field.name for field in dataclasses.fields(Limits)] + ["temperature", "warm_start_steps"]
    config = dataclasses.replace(config, mode=config.eval_mode)
    recipe = repr([Path(harness.__file__).read_text()] + [getattr(config, key) for key in keys])
    folder = Path(f"runs/warm-start-{config.mode}-{zlib.crc32(recipe.encode()):08x}")
    if folder.exists():
        return str(folder)
    chat = harness.Chat(harness.offline_tokenizer())
    model = harness.offline_model(len(chat.tokenizer), seed=0)  # runs of any --seed share one warm start
    demonstrator = harness.Demonstrator(chat, random.Random(0))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    bar = tqdm(range(config.warm_start_steps), desc="warm start, once")
    for step in bar:
        trajectories = roll_out(harness.offline_tasks(16, 1_000_000 + step), demonstrator, chat, config)
        segments = [segment for trajectory in trajectories for segment in trajectory.segments]
        loss = -torch.cat(sampled_logprobs(model, segments, config)[0]).mean()
        rise, fall = (step + 1) / 20, (config.warm_start_steps - step) / (0.3 * config.warm_start_steps)
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, rise, fall)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}")
    aside = folder.with_name(f"{folder.name}.{time.time_ns()}")
    model.save_pretrained(aside)
    chat.tokenizer.save_pretrained(aside)
    if not folder.exists():  # another run may have been faster
        aside.rename(folder)
    return str(folder)


# ---- Credit: an estimator takes one group, its gains known, and gives every token an advantage -------------
def columns(group: list[Trajectory]) -> tuple[list, list, list]:
    """Rewards [G], and kinds and gains, G lists [N_i]."""
    kinds, gains = ([[getattr(s, key) for s in t.sessions] for t in group] for key in ("kind", "gain"))
    return [trajectory.reward for trajectory in group], kinds, gains


def set_advantages(group: list[Trajectory], advantages: list[torch.Tensor]) -> None:
    """Of G tensors [N_i], to the sessions and all their tokens."""
    for trajectory, advantages_N in zip(group, advantages):
        for session, advantage in zip(trajectory.sessions, advantages_N.tolist()):
            session.advantage = advantage
        for segment in trajectory.segments:
            segment.advantage = advantages_N[segment.session].tolist()


def mosaic_credit(group: list[Trajectory], config: Config, model, chat) -> None:
    """M11, an advantage per session."""
    strengths = (config.rho, config.beta0, config.beta1, config.lam)
    switches = (config.session_aware, config.shaping)
    set_advantages(group, mosaic.mosaic_advantage(*columns(group), *strengths, *switches))


def broadcast_credit(group: list[Trajectory], config: Config, model, chat) -> None:
    """M2, the trajectory's advantage for every session."""
    set_advantages(group, mosaic.broadcast_advantage(*columns(group)[:2]))


def igpo_credit(group: list[Trajectory], config: Config, model, chat) -> None:
    """IGPO, an advantage per turn of the main agent; a subagent shares that of the turn that sent it."""
    turns = [[] for _ in group]  # (segment, start, stop) of each turn and what it was answered
    for mine, trajectory in zip(turns, group):
        for index in [session.segment for session in trajectory.sessions if session.kind == "normal"]:
            segment = trajectory.segments[index]
            mine += [(index, a, b) for a, b in pairwise([*segment.turns, len(segment.token_ids)])]
    places = [(t, segment, start) for t, turns_n in zip(group, turns) for segment, start, _ in turns_n]
    values = torch.tensor(potentials_at(model, places, chat, config.token_budget))
    # Entry t is Phi before turn t + 1. The last turn earns the outcome, so nothing is wanted after it.
    probs = [torch.cat([phi_n, phi_n[-1:]]).exp() for phi_n in values.split(list(map(len, turns)))]
    advantages = mosaic.igpo_advantage([trajectory.reward for trajectory in group], probs)
    for trajectory, turns_n, advantages_n in zip(group, turns, advantages):
        segments = trajectory.segments
        for (index, start, stop), advantage in zip(turns_n, advantages_n.tolist()):
            segments[index].advantage[start:stop] = [advantage] * (stop - start)
        for session in trajectory.sessions:
            index, merged_at = session.before
            if session.kind == "subagent":
                segments[session.segment].advantage = [segments[index].advantage[merged_at]] * session.stop
            session.advantage = segments[session.segment].advantage[session.stop - 1]  # its last turn's


ESTIMATORS = {"mosaic": mosaic_credit, "broadcast": broadcast_credit, "igpo": igpo_credit}


# ---- Update ------------------------------------------------------------------------------------------------
def sampled_logprobs(model, segments: list, config: Config) -> tuple[list, list]:
    """(log-probs, entropies) of the tokens of each segment that the policy sampled."""
    ids = [segment.token_ids for segment in segments]
    wanted = [segment.sampled[1:] for segment in segments]
    return phi.token_logprobs(model, ids, wanted, config.token_budget, True, temperature=config.temperature)


def token_rows(trajectories: list[Trajectory]) -> list[list[tuple]]:
    """Per trajectory its segments with old log-probs, advantages and weights, [T] of the sampled tokens."""
    rows = []
    for trajectory in trajectories:
        # M12's denominators are those of the whole batch, taken here, before anything is split.
        n_sampled = sum(sum(segment.sampled) for segment in trajectory.segments)
        weight = 1 / (len(trajectories) * n_sampled)
        rows.append([])
        for segment in trajectory.segments:
            lists = (segment.logprobs, segment.advantage, [weight] * len(segment.sampled))
            rows[-1].append((segment, *torch.tensor(lists)[:, torch.tensor(segment.sampled)]))
    return rows


def update(model, optimizer, trajectories: list[Trajectory], step: int, config: Config) -> dict:
    """`minibatches` optimizer steps on one batch (M12). -> metrics."""
    rows = token_rows(trajectories)
    order = random.Random(f"{config.seed} {step}").sample(range(len(rows)), len(rows))
    sums = Counter()
    for m in range(config.minibatches):
        # Whole trajectories are dealt out: the number of optimizer steps does not depend on sessions.
        minibatch = [row for i in order[m :: config.minibatches] for row in rows[i]]
        for part in phi.batches_by_length([len(row[0].token_ids) for row in minibatch], config.token_budget):
            segments, *parts = zip(*[minibatch[k] for k in part])
            logprobs_T, entropy_T = map(torch.cat, sampled_logprobs(model, segments, config))
            old_T, advantages_T, weights_T = map(torch.cat, parts)
            clips = (config.clip_low, config.clip_high)
            loss = mosaic.policy_loss(logprobs_T, old_T, advantages_T, weights_T, *clips)
            # A minibatch stands for the whole batch, so its gradient is scaled up to estimate the batch's.
            (loss * config.minibatches).backward()
            change_T = logprobs_T.detach() - old_T
            outside = (change_T.exp() < 1 - config.clip_low) | (change_T.exp() > 1 + config.clip_high)
            sums.update(loss=loss.item(), tokens=len(old_T), entropy=entropy_T.sum().item())
            sums["clip_fraction"] += outside.sum().item()
            if m == 0:  # up to the first optimizer step, engine and trainer hold the same weights
                sums.update(gap=change_T.abs().sum().item(), gap_tokens=len(old_T))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        sums["skipped"] += not norm.isfinite()
        if norm.isfinite():  # a broken minibatch must not spoil the weights of a run of days
            optimizer.step()
        optimizer.zero_grad()
        sums["grad_norm"] += norm.item() / config.minibatches
    means = {key: sums[key] / sums["tokens"] for key in ("entropy", "clip_fraction")}
    means["engine_gap"] = sums["gap"] / sums["gap_tokens"]
    return {key: sums[key] for key in ("loss", "grad_norm", "skipped")} | means


# ---- The folder of a run -----------------------------------------------------------------------------------
def save_checkpoint(folder: Path, model, tokenizer, optimizer, step: int, config: Config) -> None:
    """Written aside, then renamed: a folder of this name is always whole."""
    aside, old = folder.with_name("checkpoint.aside"), folder.with_name("checkpoint.old")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    (aside / "mosaic.json").write_text(json.dumps(vars(config) | {"mode": config.eval_mode}, indent=1))
    logs = [folder.parent / name for name in ("metrics.jsonl", "trajectories.jsonl")]
    sizes = {log.name: log.stat().st_size if step else 0 for log in logs}
    torch.save({"step": step, "optimizer": optimizer.state_dict(), "sizes": sizes}, aside / "trainer.pt")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


# ---- The main loop -----------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> None:
    try:
        train(make_config(sys.argv[1:] if argv is None else argv))
    except harness.UserError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def train(config: Config) -> None:
    out = Path(config.out)
    # The old one is what a kill between the two renames of save_checkpoint leaves.
    folder = out / ("checkpoint" if (out / "checkpoint").exists() else "checkpoint.old")
    if config.resume and not folder.exists():
        raise harness.UserError(f"--resume: expected a checkpoint in {out}, found none")
    if not config.resume and (out / "metrics.jsonl").exists():
        raise harness.UserError(f"--out {out}: expected no run there, found one: --resume it or name another")
    tasks, world = harness.offline_tasks(2000, config.seed), harness.open_world(config)
    if config.tasks:
        tasks = harness.load_tasks(config.tasks)
        random.Random(config.seed).shuffle(tasks)
    start = config.model or warm_start(config)
    model, tokenizer = harness.load_policy(str(folder) if config.resume else start)
    chat = harness.Chat(tokenizer)
    for task in tasks:
        harness.Agent(task, None, chat, config, None)  # a prompt that does not fit is found here
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    engine = harness.HFEngine(model, chat.close[0], config.temperature, config.seed)
    out.mkdir(parents=True, exist_ok=True)
    state = {"step": 0}
    if config.resume:
        state = torch.load(folder / "trainer.pt", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        optimizer.param_groups[0]["lr"] = config.lr
        for log, size in state["sizes"].items():  # what came after the checkpoint is written again
            if (out / log).exists():
                os.truncate(out / log, size)
    (out / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1))
    if not state["step"]:
        save_checkpoint(out / "checkpoint", model, tokenizer, optimizer, 0, config)
        evaluate_held_out("before", start, config)
    bar = tqdm(range(state["step"], config.steps), config.out, initial=state["step"], total=config.steps)
    for step in bar:
        clock = [time.perf_counter()]
        engine.generator.manual_seed(config.seed * 1_000_003 + step)
        # A function of the step alone, so that resuming is exact.
        places = range(step * config.tasks_per_step, (step + 1) * config.tasks_per_step)
        batch = [tasks[k % len(tasks)] for k in places for _ in range(config.group_size)]
        rolled = roll_out(batch, engine, chat, config, world)
        clock.append(time.perf_counter())
        groups = [rolled[g : g + config.group_size] for g in range(0, len(rolled), config.group_size)]
        # reward None: search or judge was down. Such a trajectory leaves its group, it is not a failure.
        groups = [kept for group in groups if (kept := [t for t in group if t.reward is not None])]
        trajectories = [trajectory for group in groups for trajectory in group]
        if not trajectories:
            raise harness.UserError("search or judge is down: not one rollout of this step has a verdict")
        for group in groups if config.reference == "group" else []:
            answer = mosaic.group_reference([t.reward for t in group], [t.answer for t in group])
            for trajectory in group:
                trajectory.reference = answer
        score_sessions(model, trajectories, chat, config.token_budget)
        if config.fork_credit == "counterfactual":
            score_forks(model, trajectories, chat, config.token_budget)
        for group in groups:
            _, kinds, gains = columns(group)
            for trajectory, scores_N in zip(group, mosaic.normalise_by_kind(gains, kinds)):
                for session, score in zip(trajectory.sessions, scores_N.tolist()):
                    session.normalised = score
        clock.append(time.perf_counter())
        for group in groups:
            ESTIMATORS[config.advantage](group, config, model, chat)
        clock.append(time.perf_counter())
        metrics = update(model, optimizer, trajectories, step, config)
        clock.append(time.perf_counter())
        engine.load_weights(model.named_parameters())
        clock.append(time.perf_counter())
        wins = [sum(t.reward > mosaic.SUCCESS for t in group) / len(group) for group in groups]
        lines = [{"step": step, **describe(trajectory, chat)} for trajectory in trajectories]
        row = {"step": step, **summarise(lines), **metrics, "dropped": len(rolled) - len(trajectories)}
        row |= {"all_success_groups": wins.count(1), "all_failure_groups": wins.count(0)}
        row["mixed_groups"] = sum(0 < win < 1 for win in wins)
        phases = ("rollout", "phi", "credit", "update", "sync")
        row |= {f"seconds_{phase}": b - a for phase, (a, b) in zip(phases, pairwise(clock))}
        harness.append_jsonl(out / "metrics.jsonl", [row])
        harness.append_jsonl(out / "trajectories.jsonl", lines)
        speed = row["tokens"] * row["n"] / (clock[-1] - clock[0])
        bar.set_postfix_str(f"reward {row['reward']:.2f} sessions {row['sessions']:.2f} {speed:.0f} tok/s")
        if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
            save_checkpoint(out / "checkpoint", model, tokenizer, optimizer, step + 1, config)
    evaluate_held_out("after", start, config)


def evaluate_held_out(when: str, start: str, config: Config) -> None:
    """The checkpoint's figures in the offline world, greedy and sampled; into eval.json."""
    if config.tasks or not config.eval_tasks:
        return
    out = Path(config.out)
    # Gains are scored by the policy that RL started from: to compare runs takes one yardstick.
    flags = [f"--model={out}/checkpoint", f"--frozen={start}", f"--n={config.eval_tasks}"]
    greedy = evaluate([*flags, f"--out={out}/{when}-greedy.jsonl", "--greedy"])
    row = evaluate([*flags, f"--out={out}/{when}-sampled.jsonl"])
    row |= {f"{key}_greedy": greedy[key] for key in ("accuracy", "interval")}
    results = json.loads((out / "eval.json").read_text()) if (out / "eval.json").exists() else {}
    (out / "eval.json").write_text(json.dumps(results | {when: row}, indent=1))
    text = "accuracy {accuracy:.3f} [{interval[0]:.3f}, {interval[1]:.3f}], greedy {accuracy_greedy:.3f}"
    print(f"{when:>6}: {text.format(**row)}; {row['sessions']:.2f} sessions")


if __name__ == "__main__":
    main()
