"""Synchronous GRPO over sets of sessions, with Mosaic's credit. One step is the loop at the end of this file:
    tasks -> rollouts -> Phi -> gains -> one advantage per session -> per token -> policy loss -> sync

Left out on purpose: a critic, a KL penalty, an entropy bonus, rollouts that overlap training.
    python train.py --mode compaction            # offline world and tiny model: no GPU, no download
    torchrun --nproc-per-node 8 train.py --preset paper --mode compaction --tasks my.jsonl --corpus docs/
"""

import json
import math
import os
import random
import runpy
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.modeling_layers import GradientCheckpointingLayer

import eval as evaluation
import harness
import mosaic
import phi
from harness import HfArg, Segment, Setup, UserError, expect, require


# ---- Config ------------------------------------------------------------------------------------------------
@dataclass
class Config(Setup):  # one run; the fields of Limits and Setup (harness.py) are flags too
    preset: Literal["", "toy", "own", "one-gpu", "paper"] = HfArg(default="", help="empty: toy, or own tasks")
    dry_run: bool = HfArg(default=False, help="check data, keys and prompts, print the plan, load no weights")
    advantage: str = HfArg(default="mosaic", help="the credit, an entry of mosaic.ADVANTAGES")
    session_aware: bool = HfArg(default=True, help="trajectory level of Mosaic, M4 and M5; without it M1")
    shaping: bool = HfArg(default=True, help="session level of Mosaic, M7 to M10")
    measure_gains: bool = HfArg(default=False, help="log gains with broadcast and igpo too, which do without")
    rho: float = HfArg(default=0.2, help="strength of the session-count signal (M4), 0 <= rho < 1")
    beta0: float = HfArg(default=0.1, help="fallback of all-failure groups (M5)")
    beta1: float = HfArg(default=0.2, help="fallback of all-success groups (M5)")
    lam: float = HfArg(default=0.1, help="weight of the information gain, lambda (M11)")
    clip_low: float = HfArg(default=0.2, help="clip of the importance ratio below 1 (M12)")
    clip_high: float = HfArg(default=0.2, help="clip of the importance ratio above 1 (M12)")
    steps: int = HfArg(default=60, help="steps: a batch of rollouts and its updates each")
    tasks_per_step: int = HfArg(default=8, help="tasks of a step")
    group_size: int = HfArg(default=8, help="trajectories per task, G")
    minibatches: int = HfArg(default=4, help="optimizer steps per batch, however many sessions it has")
    lr: float = HfArg(default=4e-4, help="learning rate, constant")
    parity_tolerance: float = HfArg(default=1e-3, help="mean |engine - trainer| log-prob that ends the run")
    eval_tasks: int = HfArg(default=256, help="held-out tasks, evaluated before and after")
    out: str = HfArg(default="", help="folder of the run; empty: runs/[TASKS-]MODE-ADVANTAGE-SEED")
    resume: bool = HfArg(default=False, help="go on from the checkpoint in the folder of the run")
    checkpoint_every: int = HfArg(default=10, help="steps between checkpoints")

    def __post_init__(self):
        prefix = f"{Path(self.tasks).stem}-" if self.tasks else ""
        self.out = self.out or f"runs/{prefix}{self.mode}-{self.advantage}-{self.seed}"
        super().__post_init__()
        require(self, "rho", self.rho < 1, "less than 1")
        most = self.tasks_per_step * self.group_size
        require(self, "minibatches", self.minibatches <= most, f"at most the {most} trajectories of a step")
        known = mosaic.ADVANTAGES
        require(self, "advantage", self.advantage in known, f"one of {', '.join(known)}")
        if self.preset == "paper" and not self.dry_run:
            require(self, "preset", torch.cuda.is_available(), "a GPU")


def make_config(argv):
    """The preset, then your flags; with --resume the run's own config, and of your flags what may change."""
    given = harness.parse_flags(Config, argv, __doc__)
    preset = given.get("preset") or ("own" if given.get("tasks") else "toy")
    values = harness.values_of(preset, given.get("mode", "compaction"))
    config = Config(**{**values, **given, "preset": preset})
    if not config.resume:
        return config
    saved = Path(config.out, "config.json")
    expect(saved.exists(), f"--resume: expected a run in {config.out}, found none")
    begun = json.loads(saved.read_text())
    may_change = "resume out steps checkpoint_every engine engine_memory token_budget search_url".split()
    for name, value in given.items():
        free = name in may_change or value == begun[name]
        require(config, name, free, f"{begun[name]!r}, with which {config.out} was begun")
    return Config(**{**begun, **given})


# ---- Ranks: the processes that torchrun starts, each with its own groups of rollouts -----------------------
SHARDED = "RANK" in os.environ
RANK = int(os.environ.get("RANK", 0))
N_RANKS = int(os.environ.get("WORLD_SIZE", 1))


def from_all(items):  # those of all ranks, in the order of the ranks
    parts = [items] * N_RANKS
    if SHARDED:
        dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def checkpointed(forward, *args, **options):
    """A block's forward whose activations the backward pass computes anew; its input waits on the CPU."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(forward, *args, use_reentrant=False, **options)


def shard(model):
    """FSDP2: each rank keeps a slice of the float32 weights; on GPUs the blocks compute in bfloat16. Weights
    that were gathered for a forward stay so until the next backward."""
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    expect(blocks, f"torchrun: expected a model made of blocks, found none in {type(model).__name__}")
    for block in blocks:
        block.forward = partial(checkpointed, block.forward)
    dtypes = (torch.bfloat16, torch.float32) if torch.cuda.is_available() else (None, None)
    for module in [*blocks, model]:
        fully_shard(module, mp_policy=MixedPrecisionPolicy(*dtypes), reshard_after_forward=False)
    model.forward_logprobs = partial(phi.forward_logprobs, model)
    register_fsdp_forward_method(model, "forward_logprobs")  # before it, FSDP gathers the weights


def forward(model, *args, **options):  # what phi.py calls in the place of its own forward_logprobs
    return (model.forward_logprobs if SHARDED else partial(phi.forward_logprobs, model))(*args, **options)


# ---- Credit: M8 to M11 for the sessions of one group, and for each of their tokens -------------------------
def credit(group, turn_probs, config):
    """Write the normalised gain and the advantage of each session, and the advantage of each token.
    turn_probs: for IGPO, exp(Phi) where the turns of each trajectory begin; else None."""
    kinds = [[session.kind for session in trajectory.sessions] for trajectory in group]
    gains = normalised = None
    if group[0].sessions[0].gain is not None:
        gains = [[session.gain for session in trajectory.sessions] for trajectory in group]
        normalised = mosaic.normalise_by_kind(gains, kinds)
    view = mosaic.Group([trajectory.reward for trajectory in group], kinds, gains, normalised, turn_probs)
    advantages = mosaic.ADVANTAGES[config.advantage](view, config)
    for i, trajectory in enumerate(group):
        spans = [(session.segment, session.start, session.stop) for session in trajectory.sessions]
        spans = trajectory.main_turns() if turn_probs else spans
        for segment in trajectory.segments:
            segment.advantage = [0.0] * len(segment.token_ids)
        for (index, start, stop), advantage in zip(spans, advantages[i].tolist(), strict=True):
            trajectory.segments[index].advantage[start:stop] = [advantage] * (stop - start)
        for j, session in enumerate(trajectory.sessions):
            own = trajectory.segments[session.segment].advantage
            if turn_probs and session.kind == "subagent":  # it shares that of the turn that sent it
                index, merged = session.before
                own[:] = [trajectory.segments[index].advantage[merged]] * len(own)
            session.advantage = own[session.stop - 1]  # with turns, that of its last one
            session.normalised = normalised[i][j].item() if normalised else None


# ---- Update (M12) ------------------------------------------------------------------------------------------
def rows_of(trajectory, n_trajectories):
    """Each segment with the old log-probs, advantages and weights of its T sampled tokens, [3, T]. The weight
    is M12's 1 / (G T_i) over the whole batch, taken here, before anything is split."""
    n_sampled = sum(sum(segment.sampled) for segment in trajectory.segments)
    rows = []
    for segment in trajectory.segments:
        weights = [1 / (n_trajectories * n_sampled)] * len(segment.sampled)
        columns = torch.tensor([segment.logprobs, segment.advantage, weights])
        rows.append((segment, columns[:, torch.tensor(segment.sampled)]))
    return rows


def loss_of(model, part, config, sums):
    """M12 for the rows of a micro-batch, T sampled tokens; what it measures on the way is added to `sums`."""
    ids = [segment.token_ids for segment, _ in part]
    wanted = [segment.sampled[1:] for segment, _ in part]
    options = {"with_entropy": True, "forward": forward, "temperature": config.temperature}
    logprobs, entropy_T = phi.token_logprobs(model, ids, wanted, config.token_budget, **options)
    logprobs_T = torch.cat(logprobs)
    old_T, advantages_T, weights_T = torch.cat([columns for _, columns in part], dim=1).to(model.device)
    loss = mosaic.policy_loss(logprobs_T, old_T, advantages_T, weights_T, config.clip_low, config.clip_high)
    change_T = logprobs_T.detach() - old_T
    outside_T = (change_T.exp() < 1 - config.clip_low) | (change_T.exp() > 1 + config.clip_high)
    sums["loss"] += loss.item()
    sums["tokens"] += len(change_T)
    sums["gap"] += change_T.abs().sum().item()
    sums["entropy"] += entropy_T.sum().item()
    sums["clip_fraction"] += outside_T.sum().item()
    return loss


def update(model, optimizer, trajectories, step, config):
    """`minibatches` optimizer steps on one batch (M12), which all ranks know whole -> metrics."""
    shuffled = random.Random(f"{config.seed} {step}").sample(trajectories, len(trajectories))
    n_minibatches = min(config.minibatches, len(shuffled))
    totals = Counter()
    for m in range(n_minibatches):
        part = shuffled[m::n_minibatches]  # whole trajectories: a vote each, however many sessions
        rows = [row for trajectory in part for row in rows_of(trajectory, len(shuffled))]
        lengths = [len(segment.token_ids) for segment, _ in rows]
        budget = min(config.token_budget, len(lengths) * max(lengths) // N_RANKS)  # a part for each rank
        batches = phi.batches_by_length(lengths, budget)
        # critical: as many on every rank, else ranks wait for ever. The missing ones have a row of no weight.
        rows.append((Segment([0, 0], [False, False]), torch.zeros(3, 0)))
        batches += [[len(lengths)]] * (-len(batches) % N_RANKS)
        sums = Counter()
        for batch in tqdm(batches[RANK::N_RANKS], "update", leave=False, disable=QUIET):
            # A minibatch stands for the whole batch, so its gradient is scaled up to estimate the batch's.
            # critical: FSDP averages gradients over the ranks, and M12 wants their sum.
            (loss_of(model, [rows[k] for k in batch], config, sums) * n_minibatches * N_RANKS).backward()
        for sums_of_rank in from_all([sums]):  # all ranks judge the same figures, so that none ends alone
            totals.update(sums_of_rank)
        if m == 0:  # up to the first optimizer step, engine and trainer hold the same weights
            gap = totals["gap"] / totals["tokens"]
            same = not gap > config.parity_tolerance  # a NaN passes: the step is skipped and counted below
            expect(same, f"--parity-tolerance: engine and trainer differ by {gap:.2g} nats a token")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = (norm.full_tensor() if SHARDED else norm).item()
        totals["grad_norm"] += norm / n_minibatches
        totals["skipped"] += not math.isfinite(norm)
        if math.isfinite(norm):  # a broken minibatch must not spoil the weights of a run of days
            optimizer.step()
        optimizer.zero_grad()
    row = {key: totals[key] for key in ("loss", "grad_norm", "skipped")}
    row |= {key: totals[key] / totals["tokens"] for key in ("entropy", "clip_fraction")}
    return row | {"engine_gap": gap}


# ---- A run: what stands ready before the first step, and its folder ----------------------------------------
QUIET = True if RANK else None  # of progress bars; None: they show on a terminal
LOGS = ("metrics.jsonl", "trajectories.jsonl")
WHOLE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


def write_json(path, row):  # aside, then renamed: a file of this name is always whole
    path.with_suffix(".aside").write_text(json.dumps(row, indent=1))
    path.with_suffix(".aside").rename(path)


def split_tasks(config):
    """(tasks to train on, tasks held out). The held-out ones are the same whatever the seed."""
    tasks = harness.load_tasks(config.tasks if config.tasks else harness.WORLD / "train.jsonl")
    n = config.eval_tasks
    if config.tasks:
        require(config, "eval_tasks", n < len(tasks), f"fewer than the {len(tasks)} of --tasks")
        random.Random(0).shuffle(tasks)
        held_out, tasks = tasks[:n], tasks[n:]
    else:
        held_out = harness.load_tasks(harness.WORLD / "held-out.jsonl")[:n]
    random.Random(config.seed).shuffle(tasks)
    return tasks, held_out


def set_up(config):
    """-> (all that a run needs, the number of its next step)."""
    if SHARDED:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(timeout=timedelta(hours=2))  # one that hangs may hang the others so long
    out = Path(config.out)
    # The old one is what a kill between the two renames of save_checkpoint leaves.
    folder = out / ("checkpoint" if (out / "checkpoint").exists() else "checkpoint.old")
    if config.resume:
        expect(folder.exists(), f"--resume: expected a checkpoint in {out}, found none")
    else:
        begun = folder.exists() or (out / LOGS[0]).exists()
        expect(not begun, f"--out {out}: a run is there; expected --resume or another folder")
    tasks, held_out = split_tasks(config)
    world = harness.open_world(config)  # (tools, judge)
    source = str(folder) if config.resume else harness.policy_of(config)
    model, chat = harness.load_policy(source, config.max_context)
    for task in [*tasks, *held_out]:
        config.room(chat, task)  # UserError: it does not fit
    out.mkdir(parents=True, exist_ok=True)
    if RANK == 0:
        write_json(out / "config.json", vars(config))
    # HFEngine draws from the trainer's own model, unless that is sharded; VLLMEngine reads its config only.
    own = harness.load_policy(source)[0] if SHARDED and config.engine == "hf" else model
    engine = harness.ENGINES[config.engine](own, config)
    engine.load_weights(model.named_parameters())
    evaluation.check_paths(model, chat, engine, config, tasks[0])
    engine.sleep()
    if SHARDED:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    run = SimpleNamespace(config=config, out=out, tasks=tasks, held_out=held_out, world=world, hinted=False)
    vars(run).update(model=model, chat=chat, engine=engine, optimizer=optimizer)
    if not config.resume:
        return run, 0
    state = torch.load(folder / "trainer.pt", weights_only=True, mmap=True)
    if state["step"]:
        states.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=WHOLE)
    for log in LOGS:  # what came after the checkpoint is done again
        if RANK == 0 and (out / log).exists():
            os.truncate(out / log, state["sizes"][log])
    return run, state["step"]


def save_checkpoint(run, step):
    """Written aside, then renamed: a folder of this name is always whole. It fits any number of ranks."""
    weights = states.get_model_state_dict(run.model, options=WHOLE)
    # Before the first step there is no state, and to ask for it would make a step.
    adam = states.get_optimizer_state_dict(run.model, run.optimizer, options=WHOLE) if step else {}
    if RANK == 0:
        folder, aside, old = [run.out / f"checkpoint{end}" for end in ("", ".aside", ".old")]
        shutil.rmtree(aside, ignore_errors=True)
        sizes = {log: (run.out / log).stat().st_size if step else 0 for log in LOGS}
        try:
            run.model.save_pretrained(aside, state_dict=weights)
            run.chat.tokenizer.save_pretrained(aside)
            (aside / "mosaic.json").write_text(json.dumps(vars(run.config), indent=1))
            torch.save({"step": step, "optimizer": adam, "sizes": sizes}, aside / "trainer.pt")
        except Exception as error:  # libraries have many words for a disk that is full
            raise UserError(f"{aside}: cannot be written ({error}); what was saved before is whole") from None
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    from_all([])  # the others wait for the first, which writes


def sync_weights(run):  # gathered one by one, so that no rank ever holds a second set of weights
    pairs = run.model.named_parameters()
    run.engine.load_weights((name, p.full_tensor() if SHARDED else p) for name, p in pairs)


def evaluate_held_out(run, when, step):
    """The policy on the held-out tasks, sampled, and in the offline world greedy too; into eval.json."""
    if not run.held_out:
        return
    row = {"steps": step}
    for decoding in ("sampled",) if run.config.tasks else ("greedy", "sampled"):
        sync_weights(run)  # by all ranks; the first one goes on with them
        if RANK == 0:
            # Gains are scored by the policy that RL started from: to compare runs takes one yardstick.
            scorer = None if SHARDED else harness.load_policy(harness.policy_of(run.config))[0]
            run.engine.temperature = run.config.temperature if decoding == "sampled" else 0.0
            out = run.out / f"{when}-{decoding}.jsonl"
            out.unlink(missing_ok=True)
            shared = (run.engine, run.chat, run.config, run.world)
            figures = evaluation.evaluate(run.held_out, *shared, out, scorer, len(run.held_out))
            row |= figures if decoding == "sampled" else {"accuracy_greedy": figures["accuracy"]}
        from_all([])
    if RANK == 0:
        file = run.out / "eval.json"
        results = json.loads(file.read_text()) if file.exists() else {}
        write_json(file, results | {when: row})
        greedy = "" if run.config.tasks else " (greedy {accuracy_greedy:.3f})"
        text = "accuracy {accuracy:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]" + greedy
        tqdm.write(f"{when:>6}: {text}, {{sessions:.2f}} sessions, n {{n}}".format(**row))


# ---- The main loop -----------------------------------------------------------------------------------------
def train(config):
    if config.dry_run:
        planning = runpy.run_path(str(Path(__file__).parent / ".tools/planning.py"))
        return planning["plan"](config, *split_tasks(config))
    run, step = set_up(config)
    if step == 0:
        save_checkpoint(run, step)
        evaluate_held_out(run, "before", step)
    bar = tqdm(total=config.steps, initial=step, desc=config.out, disable=QUIET)
    while step < config.steps:
        clock = {"start": time.perf_counter()}
        sync_weights(run)
        run.engine.temperature = config.temperature
        run.engine.reseed((config.seed * 1_000_003 + step) * N_RANKS + RANK)
        clock["sync"] = time.perf_counter()

        # 1, 2. A group of trajectories per task, each with its reward. The step alone says which tasks.
        places = range(step * config.tasks_per_step, (step + 1) * config.tasks_per_step)[RANK::N_RANKS]
        tasks = [run.tasks[k % len(run.tasks)] for k in places for _ in range(config.group_size)]
        rolled = harness.roll_out(tasks, run.engine, run.chat, config, *run.world, "" if RANK else "rollouts")
        run.engine.sleep()
        groups = groups_of(run, rolled, step)
        clock["rollout"] = time.perf_counter()

        # 3, 4. Phi at the boundaries of sessions, and gains.
        if SHARDED:  # a forward of all ranks together gathers the weights; then each goes at its own pace
            phi.answer_logprob(run.model, [[0]], [[0]], forward=forward)
        options = {"cue": run.chat.cue, "token_budget": config.token_budget, "forward": forward}
        if config.measure_gains or config.advantage not in ("broadcast", "igpo"):
            evaluation.score_gains(run.model, [t for group in groups for t in group], **options)

        # 5, 6. One advantage per session (or turn), given to all its tokens.
        for group in groups:
            at_turns = config.advantage == "igpo"
            credit(group, phi.turn_probabilities(run.model, group, **options) if at_turns else None, config)
        clock["phi"] = time.perf_counter()

        # 7. Clipped policy-gradient steps on the trajectories of all ranks.
        groups = from_all(groups)
        metrics = update(run.model, run.optimizer, [t for group in groups for t in group], step, config)
        clock["update"] = time.perf_counter()

        if RANK == 0:
            row = log(run, groups, step, metrics, clock)
            bar.set_postfix(reward=row["reward"], sessions=row["sessions"])
        step += 1
        bar.update()
        if step % config.checkpoint_every == 0 or step == config.steps:
            save_checkpoint(run, step)
    bar.close()
    evaluate_held_out(run, "after", step)
    if RANK == 0:
        print(f"results: {run.out}; read on: python eval.py --show {run.out}/trajectories.jsonl")
    if SHARDED and config.engine == "hf":  # vllm ends the processes' group by itself
        time.sleep(1)  # right after a collective, gloo sometimes aborts the process
        dist.destroy_process_group()


def groups_of(run, rolled, step):
    """The groups of this rank, less the trajectories without a reward: search or judge was down, which is no
    failure of the policy's (nor is a tool's error). With over half lost, the run ends with a checkpoint."""
    stops = from_all([trajectory.stop for trajectory in rolled if trajectory.reward is None])
    if 2 * len(stops) > run.config.tasks_per_step * run.config.group_size:
        if step:
            save_checkpoint(run, step)
        raise UserError(f"step {step} lost most of its rollouts to {dict(Counter(stops))}; --resume goes on")
    groups = []
    for k in range(0, len(rolled), run.config.group_size):
        groups.append([t for t in rolled[k : k + run.config.group_size] if t.reward is not None])
    return [group for group in groups if group]


def log(run, groups, step, metrics, clock):
    """Append a line to metrics.jsonl and one for each trajectory to trajectories.jsonl -> the former."""
    trajectories = [trajectory for group in groups for trajectory in group]
    lines = [{"step": step, **evaluation.describe(trajectory, run.chat)} for trajectory in trajectories]
    row = {"step": step, **evaluation.summarise(lines), **metrics}
    outcomes = [{trajectory.reward > mosaic.SUCCESS for trajectory in group} for group in groups]
    row |= {"mixed_groups": outcomes.count({True, False}), "all_success_groups": outcomes.count({True})}
    row["all_failure_groups"] = outcomes.count({False})
    row["dropped"] = run.config.tasks_per_step * run.config.group_size - len(lines)
    for before, phase in pairwise(clock):
        row[f"seconds_{phase}"] = clock[phase] - clock[before]
    # Metrics leave for a dashboard here: `row` is all that it needs.
    harness.append_jsonl(run.out / LOGS[0], [row])
    harness.append_jsonl(run.out / LOGS[1], lines)
    if not run.hinted and not any(any(segment.advantage) for t in trajectories for segment in t.segments):
        run.hinted = True
        advice = "if truncated, raise --max-turn-tokens; if malformed, a larger model; else easier tasks"
        tqdm.write(f"step {step}: nothing to learn from, no group's rewards differ. {row['stops']}: {advice}")
    return row


def main(argv=None):
    harness.run_program("train.py", lambda: train(make_config(argv)))


if __name__ == "__main__":
    main()
