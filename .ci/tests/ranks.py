"""What test_ranks.py starts, alone or as the ranks of torchrun. Not collected by pytest.

python ranks.py equal FOLDER        Phi and three updates of each kind of model, into FOLDER/KIND-RANKS.pt
python ranks.py odd-gap FLAGS       train.py, but the last rank's engine differs from its trainer
python ranks.py odd-load FLAGS      train.py, but the last rank's check at load fails
"""

import random
import sys
import time
from pathlib import Path

import torch
import transformers
from child import offline_tasks, shipped_policy

import eval as evaluation
import harness
import phi
import train

KINDS = ["plain", "hybrid", "tied"]


def model_of(kind: str, vocab_size: int):
    """A random model: plain, hybrid (linear attention, as Qwen3.5) or with tied embeddings."""
    sizes = {"vocab_size": vocab_size, "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16}
    sizes |= {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"initializer_range": 0.1, "tie_word_embeddings": kind == "tied"}
    make = transformers.LlamaConfig
    if kind == "hybrid":
        make = transformers.Qwen3_5TextConfig
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
        sizes |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(make(**sizes)).float().eval()


def batches_of(chat, model) -> list:
    """Three batches of trajectories. That of one task is a single segment: one of two ranks then has none."""
    batches = []
    for n, mode in ((6, "compaction"), (1, "single"), (4, "both")):
        config = train.make_config(["--mode", mode])
        engine = harness.HFEngine(model, config)
        engine.reseed(n)
        batches.append(harness.roll_out(offline_tasks(n), engine, chat, config))
    assert len(batches[1][0].segments) == 1
    return batches


def work_through(kind: str, chat, batches: list) -> list[torch.Tensor]:
    """Phi on unequal work and an update for each batch -> [figures, weight, weight, ...]."""
    config = train.make_config("--token-budget 300 --lr 1e-4 --minibatches 2 --parity-tolerance 99".split())
    rng = random.Random(0)
    model = model_of(kind, len(chat.tokenizer))
    if train.SHARDED:
        train.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, weight_decay=0.0)
    if kind == "hybrid":  # some of its gradients are nearly 0, and Adam makes whole steps of their rounding
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    figures = []
    for step, batch in enumerate(batches):
        work = []
        for trajectory in batch:
            for position in (5, 20, 35):
                work.append(trajectory.segments[0].token_ids[:position] + chat.cue)
        if train.SHARDED:
            phi.answer_logprob(model, [[0]], [[0]], forward=train.forward)
            work = [work[:2], work[2:]][train.RANK]
        answers = [[1, 2]] * len(work)
        figures += train.from_all(
            phi.answer_logprob(model, work, answers, 300, forward=train.forward).tolist()
        )
        for trajectory in batch:
            for segment in trajectory.segments:
                segment.advantage = [rng.uniform(-1, 1) for _ in segment.token_ids]
        figures += train.update(model, optimizer, batch, step, config).values()
    results = [torch.tensor(figures, dtype=torch.float64)]
    for parameter in model.parameters():
        weight = parameter.full_tensor() if train.SHARDED else parameter
        results.append(weight.detach().flatten().clone())
    return results


def equal(folder: str) -> None:
    model, chat = shipped_policy()
    batches = batches_of(chat, model)
    if train.SHARDED:
        torch.distributed.init_process_group()
    for kind in KINDS:
        results = work_through(kind, chat, batches)
        if train.RANK == 0:
            torch.save(results, Path(folder, f"{kind}-{train.N_RANKS}.pt"))
    if train.SHARDED:
        time.sleep(1)  # right after a collective, gloo sometimes aborts the process
        torch.distributed.destroy_process_group()


def odd_gap(*flags: str) -> None:
    real = harness.roll_out

    def biased(*args, **options):
        trajectories = real(*args, **options)
        for trajectory in trajectories:
            for segment in trajectory.segments:
                segment.logprobs = [logprob - 0.5 for logprob in segment.logprobs]
        return trajectories

    if train.RANK == train.N_RANKS - 1:
        harness.roll_out = biased
    train.main(list(flags))


def odd_load(*flags: str) -> None:
    def fail(*_):
        raise harness.UserError("the ways to a log-prob differ here")

    if train.RANK == train.N_RANKS - 1:
        evaluation.check_paths = fail
    train.main(list(flags))


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    {"equal": equal, "odd-gap": odd_gap, "odd-load": odd_load}[sys.argv[1]](*sys.argv[2:])
