"""Synchronous GRPO over sets of sessions, with Mosaic's credit. One step of training, in the main loop below:
    tasks -> rollouts -> Phi -> gains -> one advantage per session -> per token -> policy loss -> sync

Left out on purpose: a critic, a reward model, a KL penalty, entropy bonuses, rollouts that overlap training.
    python train.py --mode compaction            # offline world and tiny model: no GPU, no download
    torchrun --nproc-per-node 8 train.py --preset paper --mode compaction --tasks my.jsonl --corpus docs/
"""

import dataclasses
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import zlib
from collections import Counter
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from tqdm import tqdm

import harness
import mosaic
import phi
from eval import ENGINES, describe, evaluate, potentials_at, roll_out, score_sessions, summarise
from harness import HfArg, Limits, Setup, Trajectory, UserError, expect


# ---- Config ------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Config(Setup):
    """One run. The fields are the flags; those of `Limits` and `Setup` (harness.py) come first."""

    preset: Literal["toy", "paper"] = HfArg(default="toy", help="where the flags start from")
    advantage: Literal["mosaic", "broadcast", "igpo"] = HfArg(default="mosaic", help="the credit")
    session_aware: bool = HfArg(default=True, help="trajectory level of Mosaic, M4 and M5; without it M1")
    shaping: bool = HfArg(default=True, help="session level of Mosaic, M7 to M10")
    steps: int = HfArg(default=50, help="steps: a batch of rollouts and its updates each")
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
    tis_cap: float = HfArg(default=0.0, help="cap of the weights trainer / engine, say 2; 0: no weights")
    parity_tolerance: float = HfArg(default=0.1, help="mean |engine - trainer| log-prob that ends the run")
    token_budget: int = HfArg(default=16384, help="padded tokens of one forward, in Phi and in the update")
    eval_tasks: int = HfArg(default=0, help="held-out tasks of the offline world, before and after")
    eval_mode: Literal["", *get_args(harness.Mode)] = HfArg(default="", help="evaluated mode, if not --mode")
    warm_start_steps: int = HfArg(default=0, help="steps of behaviour cloning before RL, offline world")


# A preset is the flags that stand before yours. In tiny contexts, what a summary keeps decides what follows.
PRESETS = {
    "toy": """--prompts offline --max-context 220 --max-turn-tokens 24 --max-response-tokens 44 --max-turns 14
        --max-summary-tokens 14 --max-calls 16 --top-k 2 --tasks-per-step 8 --group-size 8 --minibatches 4
        --steps 60 --lr 4e-4 --parity-tolerance 1e-3 --eval-tasks 256 --warm-start-steps 500""",
    "paper": """--model Qwen/Qwen3.5-4B --engine vllm --max-context 131072 --max-turn-tokens 8192
        --max-response-tokens 16384 --max-summary-tokens 4096 --max-turns 100 --max-subagent-turns 30
        --max-sessions 17 --max-calls 200 --max-parallel-calls 4 --tasks-per-step 16 --group-size 8 --steps 62
        --minibatches 1 --tis-cap 2 --token-budget 131072 --checkpoint-every 2""",
}


def make_config(argv: list[str]) -> Config:
    """The preset's flags, then yours. UserError: a value that makes no sense."""
    config = harness.parse_flags(Config, argv, __doc__)
    if config.preset == "paper" or not config.tasks:
        # Tasks of one's own start from the fields' defaults, which suit a small model.
        config = harness.parse_flags(Config, PRESETS[config.preset].split() + argv, __doc__)
    config.eval_mode = config.eval_mode or config.mode
    config.out = config.out or f"runs/{config.mode}-{config.advantage}-{config.seed}"
    most = 1 if config.tis_cap > 0 else config.tasks_per_step * config.group_size
    rates = (config.lam, config.beta0, config.beta1, config.clip_low, config.clip_high, config.tis_cap)
    for flag, holds, expected in (
        ("--rho", 0 <= config.rho < 1, "0 <= rho < 1"),
        ("--lam, --beta..., --clip-..., --tis-cap", all(rate >= 0 for rate in rates), "numbers from 0"),
        ("--tasks-per-step, --group-size", config.tasks_per_step >= 1 < config.group_size, "1, 2 or more"),
        ("--steps, --checkpoint-every", min(config.steps, config.checkpoint_every) >= 1, "1 or more"),
        ("--minibatches", 1 <= config.minibatches <= most, f"1 to {most} (1 with --tis-cap)"),
        ("--compact-at", 0 < config.compact_at <= 1, "a part of the context, 0 < f <= 1"),
        ("--temperature, --lr", config.temperature > 0 < config.lr, "a number above 0"),
        ("--model", bool(config.model) or not config.tasks, "a model that can read --tasks"),
        ("--preset paper", config.preset != "paper" or torch.cuda.is_available(), "a GPU"),
        ("--model", "Qwen3.5" not in config.model or harness.find_spec("fla"), "flash-linear-attention"),
    ):
        expect(holds, f"{flag}: expected {expected}")
    return config


# ---- Ranks: the processes that torchrun starts, each with its own groups of rollouts -----------------------
SHARDED = "RANK" in os.environ
RANK, N_RANKS = (int(os.environ.get(key, n)) for key, n in (("RANK", 0), ("WORLD_SIZE", 1)))


def from_all(items: list) -> list:
    """The items of all ranks, in the order of the ranks."""
    parts = [items] * N_RANKS
    if SHARDED:
        dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def shard(model) -> None:
    """FSDP2: each rank keeps a slice of the float32 weights; on GPUs the layers compute in bfloat16. Weights
    that were gathered for a forward stay so until the next backward."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()  # else nothing is checkpointed
    dtypes = (torch.bfloat16, torch.float32) if torch.cuda.is_available() else (None, None)
    for module in [*model.base_model.layers, model]:
        fully_shard(module, mp_policy=MixedPrecisionPolicy(*dtypes), reshard_after_forward=False)
    model.forward_logprobs = partial(phi.forward_logprobs, model)
    register_fsdp_forward_method(model, "forward_logprobs")


# ---- Warm start --------------------------------------------------------------------------------------------
def warm_start(config: Config) -> str:
    """The folder of the tiny model after behaviour cloning of the scripted agent, made unless it is there."""
    keys = (*vars(Limits()), "temperature", "warm_start_steps")
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


# ---- Credit: one group, its gains known, and every token gets an advantage ---------------------------------
def credit(group: list[Trajectory], config: Config, model, chat) -> None:
    """Normalised gains (M8), and an advantage for every session and all its tokens: M11, M2 or IGPO's."""
    rewards = [trajectory.reward for trajectory in group]
    kinds, gains = ([[getattr(s, key) for s in t.sessions] for t in group] for key in ("kind", "gain"))
    scores, advantages = mosaic.normalise_by_kind(gains, kinds), mosaic.broadcast_advantage(rewards, kinds)
    if config.advantage == "mosaic":
        options = (config.rho, config.beta0, config.beta1, config.lam, config.session_aware, config.shaping)
        advantages = mosaic.mosaic_advantage(rewards, kinds, gains, *options)
    for trajectory, scores_N, advantages_N in zip(group, scores, advantages):
        for session, score, advantage in zip(trajectory.sessions, scores_N.tolist(), advantages_N.tolist()):
            session.normalised, session.advantage = score, advantage
        for segment in trajectory.segments:
            segment.advantage = advantages_N[segment.session].tolist()
    if config.advantage == "igpo":  # finer than by session: every turn's own, in place of those above
        igpo_credit(group, config, model, chat)


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
    for t, turns_n, advantages_n in zip(group, turns, advantages):
        for (index, start, stop), advantage in zip(turns_n, advantages_n.tolist()):
            t.segments[index].advantage[start:stop] = [advantage] * (stop - start)
        for session in t.sessions:
            index, merged = session.before
            if session.kind == "subagent":
                t.segments[session.segment].advantage = [t.segments[index].advantage[merged]] * session.stop
            session.advantage = t.segments[session.segment].advantage[session.stop - 1]  # its last turn's


# ---- Update ------------------------------------------------------------------------------------------------
def sampled_logprobs(model, segments: list, config: Config) -> tuple[list, list]:
    """(log-probs, entropies) of the tokens of each segment that the policy sampled."""
    ids, wanted = zip(*[(segment.token_ids, segment.sampled[1:]) for segment in segments])
    return phi.token_logprobs(model, ids, wanted, config.token_budget, True, temperature=config.temperature)


def token_rows(trajectories: list[Trajectory]) -> list[list[tuple]]:
    """Per trajectory its segments with old log-probs, advantages and weights, [T] of the sampled tokens."""
    rows = []
    for trajectory in trajectories:
        # M12's denominators are those of the whole batch, taken here, before anything is split.
        weight = 1 / len(trajectories) / sum(sum(segment.sampled) for segment in trajectory.segments)
        rows.append([])
        for segment in trajectory.segments:
            lists = (segment.logprobs, segment.advantage, [weight] * len(segment.sampled))
            rows[-1].append((segment, *torch.tensor(lists)[:, torch.tensor(segment.sampled)]))
    return rows


def update(model, optimizer, trajectories: list[Trajectory], step: int, config: Config) -> dict:
    """`minibatches` optimizer steps on one batch (M12), which all ranks know whole. -> metrics."""
    rows = random.Random(f"{config.seed} {step}").sample(token_rows(trajectories), len(trajectories))
    nothing = (harness.Segment([0, 0], [False, False]), *torch.zeros(3, 0))
    sums, norms = Counter(), []
    n_minibatches = min(config.minibatches, len(rows))
    for m in range(n_minibatches):
        # Whole trajectories are dealt out: the number of optimizer steps does not depend on sessions.
        minibatch = [row for of_trajectory in rows[m::n_minibatches] for row in of_trajectory]
        lengths = [len(row[0].token_ids) for row in minibatch]
        budget = min(config.token_budget, len(lengths) * max(lengths) // N_RANKS)
        parts = phi.batches_by_length(lengths, budget)
        # critical: micro-batches are as many on every rank, else ranks wait for ever; `nothing` weighs 0.
        parts += [[]] * (-len(parts) % N_RANKS)
        for part in parts[RANK::N_RANKS]:
            segments, *columns = zip(*([minibatch[k] for k in part] or [nothing]))
            logprobs_T, entropy_T = map(torch.cat, sampled_logprobs(model, segments, config))
            old_T, advantages_T, weights_T = (torch.cat(column).to(model.device) for column in columns)
            change_T = logprobs_T.detach() - old_T
            if config.tis_cap > 0:  # truncated importance sampling, Yao et al. 2025; not Mosaic's
                weights_T = weights_T * change_T.exp().clamp(max=config.tis_cap)
                old_T = logprobs_T.detach()  # there is one minibatch, so those of now are the old ones
            clips = (config.clip_low, config.clip_high)
            loss = mosaic.policy_loss(logprobs_T, old_T, advantages_T, weights_T, *clips)
            # A minibatch stands for the whole batch, so its gradient is scaled up to estimate the batch's.
            # critical: FSDP averages gradients over the ranks, and M12 wants their sum.
            (loss * n_minibatches * N_RANKS).backward()
            outside = (change_T.exp() < 1 - config.clip_low) | (change_T.exp() > 1 + config.clip_high)
            sums.update(loss=loss.item(), tokens=len(change_T), entropy=entropy_T.sum().item())
            sums["clip_fraction"] += outside.sum().item()
            sums["forwarded"] += sum(len(segment.token_ids) for segment in segments if part)
            if m == 0:  # up to the first optimizer step, engine and trainer hold the same weights
                sums.update(gap=change_T.abs().sum().item(), gap_tokens=len(change_T))
        gap = sums["gap"] / max(1, sums["gap_tokens"])
        same = not gap > config.parity_tolerance  # NaN passes: the step is skipped and counted below
        expect(same, f"--parity-tolerance: engine and trainer differ by {gap:.2g} nats a token")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append((norm.full_tensor() if SHARDED else norm).item())
        if math.isfinite(norms[-1]):  # a broken minibatch must not spoil the weights of a run of days
            optimizer.step()
        optimizer.zero_grad()
    all_sums = from_all([sums])
    sums = {key: sum(part[key] for part in all_sums) for key in sums}
    unique = sum(session.stop - session.start for t in trajectories for session in t.sessions)
    row = {key: sums[key] / sums["tokens"] for key in ("entropy", "clip_fraction")}
    skipped = len(norms) - sum(map(math.isfinite, norms))
    row |= {"loss": sums["loss"], "grad_norm": sum(norms) / len(norms), "skipped": skipped}
    return row | {"engine_gap": sums["gap"] / sums["gap_tokens"], "forwards": sums["forwarded"] / unique}


# ---- The folder of a run -----------------------------------------------------------------------------------
def save_checkpoint(folder: Path, model, tokenizer, optimizer, step: int, config: Config) -> None:
    """Written aside, then renamed: a folder of this name is always whole. It fits any number of ranks."""
    full = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(model, options=full)
    # Not before the first step: to have something to give, it would take one.
    adam = states.get_optimizer_state_dict(model, optimizer, options=full) if step else {}
    aside, old = folder.with_name("checkpoint.aside"), folder.with_name("checkpoint.old")
    if RANK == 0:
        shutil.rmtree(aside, ignore_errors=True)
        logs = ("metrics.jsonl", "trajectories.jsonl")
        sizes = {log: (folder.parent / log).stat().st_size if step else 0 for log in logs}
        try:
            model.save_pretrained(aside, state_dict=weights)
            tokenizer.save_pretrained(aside)
            (aside / "mosaic.json").write_text(json.dumps(vars(config), indent=1))
            torch.save({"step": step, "optimizer": adam, "sizes": sizes}, aside / "trainer.pt")
        except Exception as error:  # libraries have many words for a disk that is full
            raise UserError(f"{aside}: cannot be written ({error}); what was saved before is whole") from None
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    from_all([])  # the others wait for the first, which writes


# ---- The main loop -----------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> None:
    try:
        train(make_config(sys.argv[1:] if argv is None else argv))
    except (UserError, OSError, SafetensorError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # before the first step or after the last one
        raise SystemExit(130) from None


def train(config: Config) -> None:
    if SHARDED:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(timeout=timedelta(hours=2))  # one that hangs may hang the others so long
    out = Path(config.out)
    # The old one is what a kill between the two renames of save_checkpoint leaves.
    folder = out / ("checkpoint" if (out / "checkpoint").exists() else "checkpoint.old")
    expect(folder.exists() or not config.resume, f"--resume: expected a checkpoint in {out}, found none")
    begun = folder.exists() or (out / "metrics.jsonl").exists()
    expect(config.resume or not begun, f"--out {out}: expected no run or --resume")
    tasks, world = harness.offline_tasks(2000, config.seed), harness.open_world(config)
    if config.tasks:
        tasks = harness.load_tasks(config.tasks)
        random.Random(config.seed).shuffle(tasks)
    if config.resume:
        old = json.loads((folder / "mosaic.json").read_text())
        free = "resume out steps checkpoint_every engine engine_memory token_budget parity_tolerance"
        old["search_url"] = old["search_url"] and (config.search_url or "a server")  # it may move, not go
        other = [key for key in old if key not in free.split() and old[key] != vars(config).get(key)]
        expect(not other, f"--resume: {out} was begun with other values of {', '.join(other)}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(vars(config), indent=1))
    start = config.model or from_all([warm_start(config)] if RANK == 0 else [])[0]
    source = str(folder) if config.resume else start
    model, chat = harness.load_policy(source, tasks, config)
    # HFEngine draws from the trainer's own model, unless that is sharded; VLLMEngine reads its config only.
    own = harness.load_policy(source)[0] if SHARDED and config.engine == "hf" else model
    engine = ENGINES[config.engine](own, config, config.temperature)
    if SHARDED:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    state = {"step": 0}
    if config.resume:
        state = torch.load(folder / "trainer.pt", weights_only=True, mmap=True)
        if state["step"]:
            full = states.StateDictOptions(full_state_dict=True)
            states.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=full)
        for log in ("metrics.jsonl", "trajectories.jsonl"):  # what came after the checkpoint is written again
            if (out / log).exists() and RANK == 0:
                os.truncate(out / log, state["sizes"][log])
    if not state["step"]:
        save_checkpoint(out / "checkpoint", model, chat.tokenizer, optimizer, 0, config)
        evaluate_held_out("before", start, config)
    steps = range(state["step"], config.steps)
    bar = tqdm(steps, config.out, initial=state["step"], total=config.steps, disable=RANK > 0)
    broken, stop = 0, []  # a Ctrl-C fills `stop`: the run ends after this step; a second one ends it now
    signal.signal(signal.SIGINT, lambda *_: os._exit(130) if stop else stop.append(True))
    for step in bar:
        clock = {"": time.perf_counter()}
        # Gathered one by one as vLLM asks for them: then no rank ever holds a second set of weights.
        engine.load_weights((name, p.full_tensor() if SHARDED else p) for name, p in model.named_parameters())
        clock["sync"] = time.perf_counter()
        engine.reseed((config.seed * 1_000_003 + step) * N_RANKS + RANK)
        # A function of the step alone, so that resuming is exact.
        places = range(step * config.tasks_per_step, (step + 1) * config.tasks_per_step)
        mine = [tasks[k % len(tasks)] for k in places[RANK::N_RANKS] for _ in range(config.group_size)]
        rolled = roll_out(mine, engine, chat, config, world)
        engine.sleep()
        clock["rollout"] = time.perf_counter()
        groups = [rolled[g : g + config.group_size] for g in range(0, len(rolled), config.group_size)]
        # reward None: search or judge was down, or an error. That is no failure of the policy's, and no vote.
        lost = from_all([t.stop for t in rolled if t.reward is None])
        groups = [kept for group in groups if (kept := [t for t in group if t.reward is not None])]
        if SHARDED:  # a forward of all ranks together gathers the weights; then each forwards at its own pace
            phi.answer_logprob(model, [[0]], [[0]])
        score_sessions(model, [t for group in groups for t in group], chat, config.token_budget)
        clock["phi"] = time.perf_counter()
        for group in groups:
            credit(group, config, model, chat)
        clock["credit"] = time.perf_counter()
        groups = from_all(groups)
        trajectories = [trajectory for group in groups for trajectory in group]
        asked = from_all([(service, t.reward is None) for t in rolled for service in t.asked])
        # Where all that asked a service are lost, the others did without: to train on them would teach that.
        down = [s for s in dict(asked) if asked.count((s, True)) > 3 and (s, False) not in asked]
        if down or not trajectories:  # the steps before must not be lost
            save_checkpoint(out / "checkpoint", model, chat.tokenizer, optimizer, step, config)
        why = f"step {step} lost {Counter(lost)}, all that asked {down or 'anything'}; --resume goes on"
        expect(trajectories and not down, why)
        metrics = update(model, optimizer, trajectories, step, config)
        clock["update"] = time.perf_counter()
        broken = broken + 1 if metrics["skipped"] == min(config.minibatches, len(trajectories)) else 0
        expect(broken < 3, f"no finite gradient in three steps; {out}/checkpoint is still good")
        wins = [sum(t.reward > mosaic.SUCCESS for t in group) / len(group) for group in groups]
        lines = [{"step": step, **describe(trajectory, chat)} for trajectory in trajectories]
        row = {"step": step, **summarise(lines), **metrics}
        row |= {"dropped": len(lost), "errors": lost.count("error")}
        row |= {"all_success_groups": wins.count(1), "all_failure_groups": wins.count(0)}
        row["mixed_groups"] = sum(0 < win < 1 for win in wins)
        row |= {f"seconds_{phase}": b - a for (_, a), (phase, b) in pairwise(clock.items())}
        if RANK == 0:
            harness.append_jsonl(out / "metrics.jsonl", [row])
            harness.append_jsonl(out / "trajectories.jsonl", lines)
        speed = row["tokens"] * row["n"] / (clock["update"] - clock[""])
        bar.set_postfix({key: row[key] for key in ("reward", "sessions", "forwards")}, tok_per_s=round(speed))
        stopped = any(from_all(stop))
        if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps or stopped:
            save_checkpoint(out / "checkpoint", model, chat.tokenizer, optimizer, step + 1, config)
        expect(not stopped, f"Ctrl-C: stopped after step {step}; --resume goes on")
    evaluate_held_out("after", start, config)
    if SHARDED and config.engine == "hf":  # vllm ends the processes' group by itself
        time.sleep(1)  # right after a collective, gloo sometimes aborts the process
        dist.destroy_process_group()


def evaluate_held_out(when: str, start: str, config: Config) -> None:
    """The checkpoint's figures in the offline world, greedy and sampled; into eval.json."""
    if config.tasks or not config.eval_tasks or RANK > 0:
        return
    out = Path(config.out)
    # Gains are scored by the policy that RL started from: to compare runs takes one yardstick.
    flags = [f"--model={out}/checkpoint", f"--frozen={start}", f"--n={config.eval_tasks}"]
    greedy = evaluate([*flags, f"--out={out}/{when}-greedy.jsonl", "--greedy"])
    row = evaluate([*flags, f"--out={out}/{when}-sampled.jsonl"])
    row |= {f"{key}_greedy": greedy[key] for key in ("accuracy", "interval")}
    results = json.loads((out / "eval.json").read_text()) if (out / "eval.json").exists() else {}
    (out / "eval.json.aside").write_text(json.dumps(results | {when: row}, indent=1))
    (out / "eval.json.aside").rename(out / "eval.json")
    text = "accuracy {accuracy:.3f} [{interval[0]:.3f}, {interval[1]:.3f}], greedy {accuracy_greedy:.3f}"
    print(f"{when:>6}: {text.format(**row)}; {row['sessions']:.2f} sessions")


if __name__ == "__main__":
    main()
