"""The plan of a run, without its weights: python train.py --dry-run and the run's other flags.

Reads the tasks, the documents, the keys, the tokenizer and its template, and checks that every prompt fits.
The memory of the update is computed on shapes (memory.py), for the families whose kernels are known there.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from memory import KNOWN, measure
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import harness
from harness import UserError, expect


def read_chat(source: str):
    """(the model's config, its Chat). UserError: none there."""
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # libraries have many words for it
        raise UserError(
            f"--model {source}: expected a model's config and tokenizer ({error!r:.200})"
        ) from None
    try:
        stops = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:  # it need not have one
        stops = None
    return config, harness.Chat(tokenizer, stops)


def plan(config, tasks, held_out) -> None:
    """Print what a run with these flags would do. UserError: it would not even begin."""
    tools, _ = harness.open_world(config)
    source = harness.policy_of(config)
    model_config, chat = read_chat(source)
    longest = getattr(model_config.get_text_config(), "max_position_embeddings", None) or config.max_context
    expect(config.max_context <= longest, f"--max-context {config.max_context}: expected at most {longest}")
    for task in [*tasks, *held_out]:
        config.room(chat, task)
    prompt = max(len(chat.main_prompt(config, task.question)) for task in [*tasks, *held_out])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    n = sum(weights.numel() for weights in model.parameters())
    ranks = int(os.environ.get("WORLD_SIZE", 8 if config.preset == "paper" else 1))
    rollouts = config.tasks_per_step * config.group_size
    drawn = config.max_turn_tokens * config.max_turns + config.max_summary_tokens * config.max_sessions
    updates = config.minibatches * config.steps
    evaluated = (2 if config.tasks else 4) * len(held_out)  # before and after, sampled and offline greedy too
    family = model_config.get_text_config().model_type
    memory = f"{12 * n / ranks / 1e9:.1f} GB for weights and moments; the rest is not known for {family}"
    if family in KNOWN:
        tokens = max(config.max_context, config.token_budget)
        figures = measure(model_config, tokens, ranks, on_gpu=False)
        memory = f"{figures['peak']:.1f} GB at {tokens:,} tokens, {figures['state']:.1f} GB between updates"
    lines = {
        "policy": f"{source}, {n / 1e6:,.1f} million weights",
        "search": type(tools).__name__ if tools else "documents of each task",
        "tasks": f"{len(tasks)} to train on, {len(held_out)} held out; longest prompt {prompt} tokens",
        "a step": f"{rollouts} rollouts of at most {config.max_turns} turns and {drawn:,} drawn tokens each",
        "update": f"{config.minibatches} optimizer steps a step, {updates} in {config.steps} steps",
        "evaluation": f"{evaluated} rollouts, before and after training together",
        "checkpoint": f"{12 * n / 1e9:.1f} GB, every {config.checkpoint_every} steps",
        "memory": f"{memory}, on each of {ranks} GPUs beside the engine; computed, not measured",
    }
    for name, text in lines.items():
        print(f"{name + ':':<12}{text}")
