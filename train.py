"""Synchronous GRPO over sets of sessions, with Mosaic's credit. The main loop is one step of training:

    tasks -> rollout -> Phi -> gains -> one advantage per session -> per token -> policy loss -> sync -> metrics

Left out on purpose: a critic, a reward model, a KL penalty, entropy bonuses, asynchronous rollouts.

    python train.py --mode compaction                     # offline world, tiny model, no GPU, minutes
    python train.py --mode compaction --model DIR --tasks my.jsonl --corpus docs/
"""

import asyncio
import dataclasses
import inspect
import json
import random
import shutil
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import harness
import mosaic
import phi
from eval import describe, evaluate, potentials_at, score_sessions, summarise
from harness import Limits, Trajectory, option

# -------------------------------------------------------------------------------------------------- config


@dataclass
class Config(Limits):
    """One run. Its fields are the flags; those of `Limits` (harness.py) come first."""

    preset: str = option("toy", "toy (offline world and tiny model, unless --model is given) or paper")
    mode: str = option("compaction", "single, compaction, subagent or both")
    advantage: str = option("mosaic", "mosaic, broadcast or igpo")
    session_aware: bool = option(True, "trajectory level of Mosaic (M4, M5); off: plain GRPO advantage (M1)")
    shaping: bool = option(True, "session level of Mosaic (M7 to M10)")
    model: str = option("", "folder or hub id of the policy; empty: the tiny offline model, warm-started")
    engine: str = option("hf", "what generates: hf or vllm")
    tasks: str = option("", "JSONL file of tasks; empty: the offline world")
    corpus: str = option("", "JSONL file or folder of documents that search and visit work on")
    eval_file: str = option("", "JSONL file of held-out tasks; empty: the offline world's, or no evaluation")
    steps: int = option(40, "steps: one batch of rollouts and its updates each")
    seed: int = option(0, "seed of tasks, sampling and minibatches")
    out: str = option("", "folder of the run; empty: runs/<mode>-<advantage>-<seed>")
    resume: bool = option(False, "go on from the checkpoint in the run's folder")
    checkpoint_every: int = option(10, "steps between checkpoints")
    tasks_per_step: int = option(4, "tasks (groups) a step")
    group_size: int = option(4, "trajectories of a group, G")
    rho: float = option(0.2, "strength of the session-count signal (M4), 0 <= rho < 1")
    beta0: float = option(0.1, "fallback of all-failure groups (M5)")
    beta1: float = option(0.2, "fallback of all-success groups (M5)")
    lam: float = option(0.1, "weight of the normalised information gain (M11)")
    clip_low: float = option(0.2, "clip of the importance ratio below 1 (M12)")
    clip_high: float = option(0.2, "clip of the importance ratio above 1 (M12)")
    minibatches: int = option(2, "optimizer steps a batch, however many sessions it has")
    lr: float = option(1e-6, "learning rate, constant")
    max_grad_norm: float = option(1.0, "gradient norm at which gradients are clipped")
    temperature: float = option(1.0, "sampling temperature; log-probs are taken at it too")
    token_budget: int = option(16384, "padded tokens forwarded at once, in Phi and in the update")
    eval_tasks: int = option(0, "held-out tasks before the first and after the last step")
    train_tasks: int = option(4096, "tasks that the offline world generates for training")
    warm_start_steps: int = option(0, "steps of behaviour cloning for the offline model")
    warm_start_batch: int = option(16, "demonstrations a step of behaviour cloning")
    warm_start_lr: float = option(3e-3, "peak learning rate of behaviour cloning")
    warm_start_seed: int = option(0, "seed of the warm start, shared by runs of different --seed")


# The tiny model gets tiny contexts, in which what a summary keeps decides what happens next.
PRESETS = {
    "toy": {
        "prompts": "offline",
        "max_context": 220,
        "max_turn_tokens": 24,
        "max_response_tokens": 44,
        "max_summary_tokens": 14,
        "max_turns": 14,
        "max_subagent_turns": 3,
        "max_sessions": 9,
        "max_calls": 16,
        "max_parallel_calls": 2,
        "top_k": 2,
        "tasks_per_step": 8,
        "group_size": 8,
        "lr": 6e-4,
        "eval_tasks": 256,
        "warm_start_steps": 500,
    },
    "paper": {
        "model": "Qwen/Qwen3.5-4B",
        "engine": "vllm",
        "max_context": 131072,
        "max_turn_tokens": 8192,
        "max_response_tokens": 16384,
        "max_summary_tokens": 4096,
        "max_turns": 100,
        "max_subagent_turns": 30,
        "max_sessions": 17,
        "max_calls": 200,
        "tasks_per_step": 16,
        "group_size": 8,
        "steps": 62,
        "token_budget": 131072,
    },
}
CHOICES = {
    "preset": tuple(PRESETS),
    "mode": harness.MODES,
    "advantage": ("mosaic", "broadcast", "igpo"),
    "engine": ("hf", "vllm"),
    "prompts": tuple(harness.PROMPTS),
}


def make_config(argv: list[str] | None) -> Config:
    """Field defaults, then the preset, then the flags. A wrong flag ends the program with one sentence."""
    parser = harness.flag_parser(Config, CHOICES, __doc__)
    flags = vars(parser.parse_args(argv))
    preset = flags.get("preset", "toy")
    config = Config(**{} if preset == "toy" and flags.get("model") else PRESETS[preset])
    config = dataclasses.replace(config, **flags)
    config.out = config.out or f"runs/{config.mode}-{config.advantage}-{config.seed}"
    checks = {
        "--rho": (0 <= config.rho < 1, "0 <= rho < 1"),
        "--lam": (config.lam >= 0, "a number >= 0"),
        "--beta0": (config.beta0 >= 0, "a number >= 0"),
        "--beta1": (config.beta1 >= 0, "a number >= 0"),
        "--group-size": (config.group_size >= 2, "at least 2 trajectories to compare"),
        "--minibatches": (1 <= config.minibatches <= config.tasks_per_step, "1 to --tasks-per-step"),
        "--compact-at": (0 < config.compact_at <= 1, "a fraction of the context, 0 < f <= 1"),
        "--temperature": (config.temperature > 0, "a temperature above 0"),
        "--max-summary-tokens": (config.max_summary_tokens < config.max_context, "less than --max-context"),
        "--corpus": (bool(config.corpus) == bool(config.tasks), "--tasks and --corpus together"),
        "--engine": (config.engine == "hf", "hf (vllm comes with the multi-GPU issue)"),
    }
    for flag, (holds, expected) in checks.items():
        if not holds:
            parser.error(f"{flag}: expected {expected}")
    return config


# --------------------------------------------------------------------------------------------- warm start


def warm_start(config: Config) -> str:
    """The folder of the tiny model after behaviour cloning of the scripted agent; made once, then cached."""
    sources = (harness.offline_tasks, harness.offline_tokenizer, harness.offline_model, harness.Demonstrator)
    recipe = [inspect.getsource(source) for source in sources]
    recipe += [config.warm_start_steps, config.warm_start_batch, config.warm_start_lr, config.warm_start_seed]
    recipe += [getattr(config, f.name) for f in dataclasses.fields(Limits)]
    folder = Path(f"runs/warm-start-{config.mode}-{zlib.crc32(repr(recipe).encode()):08x}")
    if folder.exists():
        return str(folder)
    tokenizer = harness.offline_tokenizer()
    chat = harness.make_chat(tokenizer)
    model = harness.offline_model(len(tokenizer), config.warm_start_seed)
    demonstrator = harness.Demonstrator(chat, config.warm_start_seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warm_start_lr, betas=(0.9, 0.95))
    bar = tqdm(range(config.warm_start_steps), desc="warm start (cached afterwards)")
    for step in bar:
        tasks = harness.offline_tasks(config.warm_start_batch, config.warm_start_seed + step, "train")
        demonstrations = roll_out(tasks, demonstrator, chat, config)
        segments = [segment for trajectory in demonstrations for segment in trajectory.segments]
        logprobs = torch.cat(segment_logprobs(model, segments, config)[0])
        loss = -logprobs.mean()
        rise = min(1.0, (step + 1) / 20)
        fall = min(1.0, (config.warm_start_steps - step) / (0.3 * config.warm_start_steps))
        optimizer.param_groups[0]["lr"] = config.warm_start_lr * rise * max(0.05, fall)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    aside = folder.with_name(f"{folder.name}.{time.time_ns()}")
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(folder)
    return str(folder)


# ------------------------------------------------------------------------------------------------ rollouts


def roll_out(tasks: list, engine, chat, config: Config, tools=None) -> list[Trajectory]:
    """One rollout per task, all at once."""

    async def gather():
        jobs = [harness.rollout(task, engine, chat, config.mode, config, tools) for task in tasks]
        return await asyncio.gather(*jobs)

    return asyncio.run(gather())


def tasks_of_step(tasks: list, step: int, config: Config) -> list:
    """The step's tasks: every epoch is a fresh permutation. A function of the step alone, so resuming is exact."""
    first = step * config.tasks_per_step
    picked = []
    for k in range(first, first + config.tasks_per_step):
        epoch, place = divmod(k, len(tasks))
        order = random.Random(f"{config.seed} {epoch}").sample(range(len(tasks)), len(tasks))
        picked.append(tasks[order[place]])
    return picked


# -------------------------------------------------------------------------------------------------- credit


def normalise_gains(groups: list[list[Trajectory]]) -> None:
    """M8, written into the sessions for the metrics and for readers."""
    for group in groups:
        gains = [[session.gain for session in trajectory.sessions] for trajectory in group]
        kinds = [[session.kind for session in trajectory.sessions] for trajectory in group]
        for trajectory, normalised_N in zip(group, mosaic.normalise_by_kind(gains, kinds)):
            for session, value in zip(trajectory.sessions, normalised_N.tolist()):
                session.normalised = value


def mosaic_credit(group: list[Trajectory], config: Config, model, chat) -> list[list[tuple]]:
    """Spans (segment, start, stop, advantage) of each trajectory: one per session (M11)."""
    advantages = mosaic.mosaic_advantage(
        [trajectory.reward for trajectory in group],
        [[session.kind for session in trajectory.sessions] for trajectory in group],
        [[session.gain for session in trajectory.sessions] for trajectory in group],
        config.rho,
        config.beta0,
        config.beta1,
        config.lam,
        config.session_aware,
        config.shaping,
    )
    return session_spans(group, advantages)


def broadcast_credit(group: list[Trajectory], config: Config, model, chat) -> list[list[tuple]]:
    """M2: every session gets the trajectory's advantage."""
    kinds = [[session.kind for session in trajectory.sessions] for trajectory in group]
    return session_spans(group, mosaic.broadcast_advantage([t.reward for t in group], kinds))


def session_spans(group: list[Trajectory], advantages: list[torch.Tensor]) -> list[list[tuple]]:
    spans = []
    for trajectory, advantages_N in zip(group, advantages):
        for session, advantage in zip(trajectory.sessions, advantages_N.tolist()):
            session.advantage = advantage
        spans.append([(s.segment, s.start, s.stop, s.advantage) for s in trajectory.sessions])
    return spans


def igpo_credit(group: list[Trajectory], config: Config, model, chat) -> list[list[tuple]]:
    """IGPO: one advantage per turn of the main agent; a subagent shares that of the turn which sent it."""
    turns = [main_turns(trajectory) for trajectory in group]
    wanted = {}
    for i, starts in enumerate(turns):
        for segment, position in starts:
            wanted.setdefault((i, segment), []).append(position)
    values = potentials_at(model, group, wanted, chat, config.token_budget)
    probs = []
    for i, starts in enumerate(turns):
        chain = [values[i, *start] for start in starts]
        probs.append(torch.tensor(chain + chain[-1:]).exp())  # the last turn earns the outcome, not a change
    advantages = mosaic.igpo_advantage([trajectory.reward for trajectory in group], probs)
    spans = []
    for trajectory, starts, advantages_n in zip(group, turns, advantages):
        stops = [b[1] if a[0] == b[0] else None for a, b in zip(starts, starts[1:] + [(None, 0)])]
        mine = []
        for (segment, start), stop, advantage in zip(starts, stops, advantages_n.tolist()):
            stop = len(trajectory.segments[segment].token_ids) if stop is None else stop
            mine.append((segment, start, stop, advantage))
            for fork in trajectory.sessions:
                if fork.kind == "subagent" and fork.before[0] == segment and start <= fork.before[1] < stop:
                    mine.append((fork.segment, fork.start, fork.stop, advantage))
        spans.append(mine)
    return spans


def main_turns(trajectory: Trajectory) -> list[tuple[int, int]]:
    """(segment, position) at which each turn of the main agent begins; a compact session's at its instruction."""
    starts = []
    for session in trajectory.sessions:
        if session.kind == "subagent":
            continue
        turns = [t for t in trajectory.segments[session.segment].turns if session.start <= t < session.stop]
        turns[0] = session.start if session.kind == "compact" else turns[0]
        starts += [(session.segment, turn) for turn in turns]
    return starts


ESTIMATORS = {"mosaic": mosaic_credit, "broadcast": broadcast_credit, "igpo": igpo_credit}


# -------------------------------------------------------------------------------------------------- update


def segment_logprobs(model, segments: list, config: Config) -> tuple[list, list]:
    """(log-probs, entropies) of the sampled tokens of each segment."""
    return phi.token_logprobs(
        model,
        [segment.token_ids for segment in segments],
        wanted=[segment.sampled[1:] for segment in segments],
        token_budget=config.token_budget,
        temperature=config.temperature,
        with_entropy=True,
    )


def update(model, optimizer, trajectories: list[Trajectory], spans: list, step: int, config: Config) -> dict:
    """`minibatches` optimizer steps on one batch (M12). -> metrics of the update."""
    # Denominators of the whole batch, before any split: 1 / (trajectories * sampled tokens of the trajectory).
    rows = []
    for trajectory, mine in zip(trajectories, spans):
        n_sampled = sum(sum(segment.sampled) for segment in trajectory.segments)
        advantages = [[0.0] * len(segment.token_ids) for segment in trajectory.segments]
        for segment, start, stop, advantage in mine:
            advantages[segment][start:stop] = [advantage] * (stop - start)
        rows.append(
            [(s, a, 1 / (len(trajectories) * n_sampled)) for s, a in zip(trajectory.segments, advantages)]
        )
    order = random.Random(f"{config.seed} {step}").sample(range(len(rows)), len(rows))
    sums = Counter()
    for m in range(config.minibatches):
        # Whole trajectories are dealt out, so that the number of optimizer steps never depends on sessions.
        minibatch = [row for i in order[m :: config.minibatches] for row in rows[i]]
        optimizer.zero_grad()
        for part in phi.batches_by_length([len(row[0].token_ids) for row in minibatch], config.token_budget):
            segments = [minibatch[k][0] for k in part]
            logprobs, entropies = segment_logprobs(model, segments, config)
            masks = [torch.tensor(segment.sampled) for segment in segments]
            logprobs_T = torch.cat(logprobs)
            old_T = torch.cat([torch.tensor(s.logprobs)[mask] for s, mask in zip(segments, masks)])
            advantages_T = torch.cat([torch.tensor(minibatch[k][1])[mask] for k, mask in zip(part, masks)])
            weights_T = torch.cat([torch.full_like(lp, minibatch[k][2]) for k, lp in zip(part, logprobs)])
            loss = mosaic.policy_loss(
                logprobs_T, old_T, advantages_T, weights_T, config.clip_low, config.clip_high
            )
            # A minibatch is a sample of the batch: scaled so that its gradient estimates the whole batch's.
            (loss * config.minibatches).backward()
            ratio_T = (logprobs_T.detach() - old_T).exp()
            sums["loss"] += loss.item()
            sums["tokens"] += len(logprobs_T)
            sums["entropy"] += torch.cat(entropies).sum().item()
            sums["clipped"] += (
                ((ratio_T < 1 - config.clip_low) | (ratio_T > 1 + config.clip_high)).sum().item()
            )
            if m == 0:  # before the first optimizer step, engine and trainer hold the same weights
                sums["gap"] += (logprobs_T.detach() - old_T).abs().sum().item()
                sums["gap_tokens"] += len(logprobs_T)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        sums["grad_norm"] += norm.item() / config.minibatches
    return {
        "loss": sums["loss"],
        "grad_norm": sums["grad_norm"],
        "entropy": sums["entropy"] / sums["tokens"],
        "clip_fraction": sums["clipped"] / sums["tokens"],
        "engine_gap": sums["gap"] / max(1, sums["gap_tokens"]),
    }


# ------------------------------------------------------------------------------------- run folder and metrics


def group_counts(groups: list[list[Trajectory]]) -> dict:
    wins = [[trajectory.reward > 0.5 for trajectory in group] for group in groups]
    return {
        "mixed_groups": sum(any(w) and not all(w) for w in wins),
        "all_success_groups": sum(all(w) for w in wins),
        "all_failure_groups": sum(not any(w) for w in wins),
    }


def write_trajectories(path: Path, step: int, trajectories: list[Trajectory], chat) -> None:
    with path.open("a", encoding="utf-8") as file:
        for trajectory in trajectories:
            row = {"step": step, **describe(trajectory, chat)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def append_line(path: Path, row: dict) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def cut_after(path: Path, step: int) -> None:
    """Drop the lines of steps >= `step`, and a torn last line: they are about to be written again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] < step:
            kept.append(line)
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.replace(path)


def save_checkpoint(folder: Path, model, tokenizer, optimizer, step: int, config: Config) -> None:
    """Written aside, then renamed: a checkpoint that exists is whole."""
    aside, old = folder.with_name("checkpoint.tmp"), folder.with_name("checkpoint.old")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    (aside / "mosaic.json").write_text(json.dumps(dataclasses.asdict(config), indent=1))
    torch.save(
        {"step": step, "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()},
        aside / "trainer.pt",
    )
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


# --------------------------------------------------------------------------------------------- the main loop


def main(argv: list[str] | None = None) -> None:
    config = make_config(argv)
    try:
        train(config)
    except ValueError as error:
        raise SystemExit(f"train.py: {error}") from error


def train(config: Config) -> None:
    torch.manual_seed(config.seed)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    out = Path(config.out)
    checkpoint = out / "checkpoint"
    if config.tasks:
        tasks = harness.load_tasks(config.tasks)
        tools = harness.Corpus(harness.load_corpus(config.corpus), config.top_k)
        held_out = harness.load_tasks(config.eval_file) if config.eval_file else []
    else:
        tasks, tools = harness.offline_tasks(config.train_tasks, config.seed, "train"), None
        held_out = harness.offline_tasks(config.eval_tasks, 0, "held-out")
    if config.resume:
        source = checkpoint if checkpoint.exists() else out / "checkpoint.old"
        if not source.exists():
            raise ValueError(f"--resume: expected a checkpoint in {out}, found none")
    elif (out / "metrics.jsonl").exists():
        raise ValueError(f"--out {out}: expected a new folder, found a run; add --resume or name another")
    else:
        source = config.model or warm_start(config)
    model, tokenizer = harness.load_policy(source)
    chat = harness.make_chat(tokenizer)
    for task in tasks + held_out:
        harness.make_run(task, None, chat, config.mode, config, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    first = 0
    if config.resume:
        state = torch.load(source / "trainer.pt", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        first = state["step"]
        cut_after(out / "metrics.jsonl", first)
        cut_after(out / "trajectories.jsonl", first)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1))
    engine = harness.HFEngine(model, chat.close[0], config.temperature)
    if held_out and not config.resume:
        before, _ = evaluate(held_out, engine, chat, config.mode, config, tools, model)
        (out / "eval.json").write_text(json.dumps({"before": before}, indent=1))

    bar = tqdm(range(first, config.steps), desc=config.out, initial=first, total=config.steps)
    for step in bar:
        clock = [time.perf_counter()]
        model.eval()
        engine.generator.manual_seed(config.seed * 1_000_003 + step)
        batch = [t for t in tasks_of_step(tasks, step, config) for _ in range(config.group_size)]
        rolled = roll_out(batch, engine, chat, config, tools)
        clock.append(time.perf_counter())

        size = config.group_size
        groups = [rolled[g : g + size] for g in range(0, len(rolled), size)]
        # reward None: search or judge was down; such a trajectory leaves its group.
        groups = [[t for t in group if t.reward is not None] for group in groups]
        groups = [group for group in groups if group]
        trajectories = [trajectory for group in groups for trajectory in group]
        score_sessions(model, trajectories, chat, config.token_budget)
        clock.append(time.perf_counter())
        normalise_gains(groups)
        estimator = ESTIMATORS[config.advantage]
        spans = [span for group in groups for span in estimator(group, config, model, chat)]
        clock.append(time.perf_counter())

        model.train()
        metrics = update(model, optimizer, trajectories, spans, step, config)
        clock.append(time.perf_counter())
        engine.load_weights(model.named_parameters())
        clock.append(time.perf_counter())

        seconds = [b - a for a, b in zip(clock, clock[1:])]
        names = ("seconds_rollout", "seconds_phi", "seconds_credit", "seconds_update", "seconds_sync")
        summary = summarise(trajectories)
        row = {"step": step, **summary, **metrics, "dropped": len(rolled) - len(trajectories)}
        row |= {**group_counts(groups), **dict(zip(names, seconds))}
        append_line(out / "metrics.jsonl", row)
        write_trajectories(out / "trajectories.jsonl", step, trajectories, chat)
        tokens = sum(len(s.token_ids) for t in trajectories for s in t.segments)
        rate = f"{tokens / sum(seconds):.0f} tok/s"
        bar.set_postfix_str(f"reward {row['reward']:.2f}, sessions {row['sessions']:.2f}, {rate}")
        if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
            save_checkpoint(checkpoint, model, tokenizer, optimizer, step + 1, config)

    if held_out:
        model.eval()
        results = json.loads((out / "eval.json").read_text())
        results["after"], _ = evaluate(held_out, engine, chat, config.mode, config, tools, model)
        (out / "eval.json").write_text(json.dumps(results, indent=1))
        for when in ("before", "after"):
            print(f"{when:>6}: {results[when]}")


if __name__ == "__main__":
    main()
