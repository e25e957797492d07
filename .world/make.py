"""Makes what ships in this folder, from nothing: the tasks of the offline world, and for each mode a tiny
policy (a tokenizer, a random Qwen3 of 209,000 parameters, behaviour cloning of a noisy scripted agent).
    python .world/make.py --tasks                                    # train.jsonl and held-out.jsonl
    python .world/make.py --mode compaction --out .world/compaction  # or subagent, both; minutes each
Other limits make another policy: add --max-summary-tokens 14 and the like, and train it with --model OUT.
Ours, not the paper's. RL starts from these as it starts from any other file of tasks and folder of a model.
"""

import argparse
import json
import random
import re
import sys
import zlib
from dataclasses import fields
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import harness
import phi

NAMES = """Ada Bela Cato Dino Edda Fynn Gaia Hugo Iris Jona Kara Lino Mira Nils Orla Pax Quin Rhea Sven Tolo
Ugo Vera Wim Xena Yara Zeno Alma Bodo Cleo Dora Emil Fria Gero Hedy Ivar Juno Kian Luna Milo Nora""".split()
VERBS = ["taught", "hired", "saved", "paid", "married", "painted"]
FACT = re.compile(rf"(\w+) ({'|'.join(VERBS)}) (\w+)\.")
QUESTION = re.compile(r"From (\w+) follow ([\w, ]+)\.")
TASKS_PER_STEP = 16
LR = 3e-3


def offline_tasks(n, seed, split="train", hops=(2, 3)):
    """n tasks, each a chain of facts about names, with a page for each of 12 names. All is drawn anew, and
    nothing can be memorised. The answer is the whole chain, which Phi follows hop by hop; a checksum of the
    chain decides in which split it may occur."""
    rng = random.Random(f"{split} {seed}")
    tasks = []
    while len(tasks) < n:
        names = rng.sample(NAMES, 12)
        facts = {}
        pages = {}
        for name in names:
            others = rng.sample([other for other in names if other != name], len(VERBS))
            facts[name] = dict(zip(rng.sample(VERBS, len(VERBS)), others))
            pages[name] = " ".join(f"{name} {verb} {other}." for verb, other in facts[name].items())
        verbs = rng.sample(VERBS, rng.randint(*hops))
        chain = [rng.choice(names)]
        for verb in verbs:
            chain.append(facts[chain[-1]][verb])
        held_out = zlib.crc32(" ".join(chain).encode()) % 5 == 0
        if len(set(chain)) == len(chain) and held_out == (split == "held-out"):
            question = f"From {chain[0]} follow {', '.join(verbs)}."
            tasks.append(
                harness.Task(question, ", ".join(chain[1:]), pages, id=f"{split}-{seed}-{len(tasks)}")
            )
    return tasks


def write_tasks(folder):
    """The files that train.py and eval.py read where no --tasks are given."""
    for split, n in (("train", 640), ("held-out", 320)):
        lines = []
        for task in offline_tasks(n, 0, split):
            row = {"id": task.id, "question": task.question, "answer": task.answer, "docs": task.docs}
            lines.append(json.dumps(row) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))


def make_tokenizer():
    """A word-level tokenizer with a chat template of Qwen's form; the JSON of a call is two tokens."""
    control = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<answer>", "</answer>", *harness.TAGS]
    calls = []
    for name in harness.TOOLS:
        argument = harness.arguments_of(name)[0]
        calls.append(f'{{"name": "{name}", "arguments": {{"{argument}": "')
    marks = ["<unk>", '"}}', "system\n", "user\n", "assistant\n", "\n", ".", ",", ":", "[", "]"]
    texts = "No result Error malformed call unknown tool page no calls sessions left From follow"
    texts += " search visit delegate"
    words = re.findall(r"\w+", " ".join([texts, *harness.PROMPTS["offline"].values()]))
    vocabulary = {}
    for token in [*control, *marks, *calls, *words, *VERBS, *NAMES]:
        vocabulary.setdefault(token, len(vocabulary))
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    piece = r'\{"name": "\w+", "arguments": \{"\w+": "|"\}\}|(?:system|user|assistant)\n|\w+|[^\w ]'
    core.pre_tokenizer = pre_tokenizers.Split(Regex(piece), "removed", invert=True)
    space = decoders.Replace(Regex(r"^(?=\w)"), " ")
    tight = [decoders.Replace(mark + " ", mark) for mark in ('"', "[", ">", "\n")]
    core.decoder = decoders.Sequence([space, decoders.Fuse(), *tight])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=control[0], eos_token=control[1])
    tokenizer.add_special_tokens({"additional_special_tokens": control[2:]})
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return tokenizer


def make_model(vocab_size, seed=0):
    """A random Qwen3. At the library's deviation of 0.02, one this narrow learns in thousands of steps."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab_size, eos_token_id=1, pad_token_id=0, **sizes))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.08)
        if isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.5)
    return model


class ScriptedAgent:
    """A noisy agent with the interface of an engine: it reads a context and writes the next turn. Half of its
    turns are wasted in ways that are harmless in themselves: waste costs sessions, and rarely success."""

    def __init__(self, chat, seed=0):
        self.chat = chat
        self.rng = random.Random(seed)

    async def generate(self, token_ids, max_new_tokens, stop):
        ids = self.chat.own(self.write(self.chat.decode(token_ids))) + stop[:1]
        finish = "stop" if len(ids) <= max_new_tokens else "length"
        return ids[:max_new_tokens], [0.0] * len(ids[:max_new_tokens]), finish

    def write(self, context):
        rng = self.rng
        start, verbs = QUESTION.search(context).groups()
        known = {(a, verb): b for a, verb, b in FACT.findall(context)}
        missing = verbs.split(", ")
        chain = [start]
        facts = []  # those of the chain, as far as it is known
        while missing and (chain[-1], missing[0]) in known:
            chain.append(known[chain[-1], missing[0]])
            facts.append(f"{chain[-2]} {missing.pop(0)} {chain[-1]}.")
        if re.search(r"(Summarize|Shorter)\.<\|im_end\|>\n<\|im_start\|> *assistant\n$", context):
            return self.summary(facts, known)
        reports = "Report." in context  # it is a subagent
        if not missing or (not reports and rng.random() < 0.02):  # at times it answers before it knows
            names = chain[1:] + rng.choices(NAMES, k=len(missing))
            return f"<answer>{' '.join(facts) if reports else ', '.join(names)}</answer>"
        tool, argument = self.next_call(context, known, chain, missing, reports)
        call = json.dumps({"name": tool, "arguments": {harness.arguments_of(tool)[0]: argument}})
        return f"{facts[-1] if facts else ''}<tool_call>{call}</tool_call>"

    def summary(self, facts, known):
        """Up to four facts: most of the useful ones, and now and then others."""
        kept = [fact for fact in facts if self.rng.random() < 0.95][:4]
        others = [f"{a} {verb} {b}." for (a, verb), b in known.items()]
        others = [fact for fact in others if fact not in facts]
        while len(kept) < 4 and others and self.rng.random() < 0.3:
            kept.append(others.pop(self.rng.randrange(len(others))))
        return " ".join(kept)

    def next_call(self, context, known, chain, missing, reports):
        """(tool, argument): a needless one half of the time, else the next fact of the chain."""
        rng = self.rng
        forks = "delegate." in context
        if rng.random() < (0.3 if reports else 0.5):
            seen = sorted({chain[0], *(a for a, _ in known), *known.values()})
            other = rng.choice([a for a, _ in known] or [chain[0]])
            verb = rng.choice(VERBS)
            if forks and rng.random() < 0.7:
                return "delegate", f"From {rng.choice(seen)} follow {verb}."
            return rng.choice([("search", f"{other} {verb}"), ("visit", other)])
        if forks and rng.random() < 0.9:  # mostly a hop at a time
            part = missing[:1] if rng.random() < 0.8 else missing
            return "delegate", f"From {chain[-1]} follow {', '.join(part)}."
        return "search", f"{chain[-1]} {missing[0]}"


def clone(model, chat, limits, steps):
    """Behaviour cloning: cross-entropy on what the scripted agent wrote, on fresh tasks at every step."""
    agent = ScriptedAgent(chat)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    bar = tqdm(range(steps), desc=f"behaviour cloning, {limits.mode}")
    for step in bar:
        tasks = offline_tasks(TASKS_PER_STEP, 1_000_000 + step)
        trajectories = harness.roll_out(tasks, agent, chat, limits)
        segments = [segment for trajectory in trajectories for segment in trajectory.segments]
        n_sampled = sum(sum(segment.sampled) for segment in segments)
        rise = (step + 1) / 20
        fall = (steps - step) / (0.3 * steps)
        optimizer.param_groups[0]["lr"] = LR * min(1.0, rise, fall)
        total = 0.0
        # Small micro-batches of like lengths take a quarter of the time of one padded batch.
        for part in phi.batches_by_length([len(segment.token_ids) for segment in segments], 2048):
            ids = [segments[k].token_ids for k in part]
            wanted = [segments[k].sampled[1:] for k in part]
            loss = -torch.cat(phi.token_logprobs(model, ids, wanted)).sum() / n_sampled
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix_str(f"loss {total:.3f}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", default="compaction", choices=["compaction", "subagent", "both"])
    parser.add_argument("--steps", type=int, default=1300, help="of behaviour cloning")
    parser.add_argument("--out", default="", help="folder of the policy")
    parser.add_argument("--tasks", action="store_true", help="write the files of tasks and nothing else")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    sizes = [field.name for field in fields(harness.Limits) if field.name.startswith(("max_", "top_"))]
    for name in sizes:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=None)
    flags = vars(parser.parse_args())
    if flags["tasks"]:
        return write_tasks(Path(__file__).parent)
    if not flags["out"]:
        parser.error("--out: expected the folder of the policy, or --tasks")
    given = {name: flags[name] for name in sizes if flags[name] is not None}
    sizes = {**harness.values_of("toy", flags["mode"]), **given}
    limits = harness.Limits(mode=flags["mode"], **sizes)
    torch.set_num_threads(1)
    chat = harness.Chat(make_tokenizer())
    model = make_model(len(chat.tokenizer), flags["seed"])
    clone(model, chat, limits, flags["steps"])
    out = Path(flags["out"])
    model.to(torch.bfloat16).save_pretrained(out)
    chat.tokenizer.save_pretrained(out)
    made_for = {name: value for name, value in vars(limits).items() if name != "mode"}
    (out / "limits.json").write_text(json.dumps(made_for, indent=1))
    print(f"made {out}; evaluate it: python eval.py --mode {limits.mode} --model {out}")


if __name__ == "__main__":
    main()
