"""What the tests share: small tokenizers and models, engines whose policy follows a script, one rollout.

Everything is made anew by each call, but `offline_chat`, which nobody may change.
"""

import asyncio
import functools
import json
import random
import re
import signal
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import harness
import train

ROOT = Path(harness.__file__).parent
POLICY = ROOT / ".world" / "compaction"

# ---- Calls as a policy writes them: CALL % (tool, its parameter, value) ------------------------------------
CALL = '<tool_call>{"name": "%s", "arguments": {"%s": "%s"}}</tool_call>'
XML_CALL = "<tool_call>\n<function=%s>\n<parameter=%s>\n%s\n</parameter>\n</function>\n</tool_call>"
VISIT = CALL % ("visit", "id", "b")

# ---- Tokenizers --------------------------------------------------------------------------------------------
SPECIAL = ["<|pad|>", "<|begin|>", "<|stop|>", "<|turn|>", "<|end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TURNS = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
PLAIN = TURNS + "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
THINKING = TURNS + "{% if add_generation_prompt %}<|turn|>assistant\n<think>\n{% endif %}"


def tokenizer(template=PLAIN, tags=TAGS, special=SPECIAL, eos="<|end|>"):
    """Bytes and merges of common words. `special` are special tokens, `tags` are added ones that are not."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    texts = ["Mira planted an oak. I go over it again."]
    for prompts in harness.PROMPTS.values():
        texts += prompts.values()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, show_progress=False, initial_alphabet=alphabet)
    core.train_from_iterator(20 * texts, trainer)
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, pad_token=special[0])
    made.chat_template = template
    return made


@functools.cache
def offline_chat() -> harness.Chat:
    """The Chat of the offline world's tokenizer."""
    return harness.Chat(transformers.AutoTokenizer.from_pretrained(POLICY))


def added_ids(tok) -> set[int]:
    """The ids of all added and all special tokens."""
    return {*tok.get_added_vocab().values(), *tok.all_special_ids}


# ---- Models ------------------------------------------------------------------------------------------------
def shipped_policy():
    """(model, Chat) of a policy that ships with the project."""
    return harness.load_policy(str(POLICY))


def tiny_model(seed=0):
    """(model, Chat) of that policy; any other seed than 0: of the same form, with random weights."""
    model, chat = shipped_policy()
    if seed:
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(model.config).float().eval()
        for module in model.modules():  # as wide as that policy's own were at the beginning
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=0.08)
            if isinstance(module, torch.nn.Embedding):
                torch.nn.init.normal_(module.weight, std=0.5)
    return model, chat


def small_model(folder, kind="Qwen3", tok=None, boost=1.0, stops=None, **sizes):
    """Write a random model of this kind and its tokenizer -> the folder. `boost` makes logits as large as
    those of trained models; `stops` are the ids of its generation_config."""
    tok = tok or tokenizer()
    values = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    values |= {"vocab_size": len(tok), "eos_token_id": tok.eos_token_id}
    values |= {"pad_token_id": tok.pad_token_id, "bos_token_id": tok.pad_token_id}
    values |= sizes
    torch.manual_seed(0)
    config = getattr(transformers, kind + "Config")(**values)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(boost)
    model.generation_config.eos_token_id = stops or tok.eos_token_id
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    return str(folder)


def true_phi(model, context, answer):
    """The mean log-likelihood of an answer by the model's own logits, in one plain forward."""
    ids = torch.tensor([context + answer])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[-len(answer) :].mean().item()


# ---- Engines whose policy follows a script -----------------------------------------------------------------
class Writer:
    """An engine whose policy writes reply(context), until an id of `stop` or the limit, as all engines do."""

    def __init__(self, tok, reply):
        self.tok = tok
        self.reply = reply

    def load_weights(self, named_tensors):
        """It has none."""

    def reseed(self, seed):
        """It draws nothing."""

    def sleep(self):
        """It holds nothing."""

    async def generate(self, token_ids, max_new_tokens, stop):
        ids = self.tok.encode(self.reply(self.tok.decode(token_ids)), add_special_tokens=False)
        ids = ids[:max_new_tokens]
        for k, drawn in enumerate(ids):
            if drawn in stop:
                return ids[: k + 1], [-0.1] * (k + 1), "stop"
        return ids, [-0.1] * len(ids), "length"


# ---- The offline world, as .world/make.py makes it, and an agent that plays it -----------------------------
NAMES = """Ada Bela Cato Dino Edda Fynn Gaia Hugo Iris Jona Kara Lino Mira Nils Orla Pax Quin Rhea Sven Tolo
Ugo Vera Wim Xena Yara Zeno""".split()
VERBS = ["taught", "hired", "saved", "paid", "married", "painted"]


def offline_tasks(n: int, seed: int) -> list[harness.Task]:
    """n tasks of two or three hops, each with pages about 12 names."""
    rng = random.Random(seed)
    tasks = []
    while len(tasks) < n:
        names = rng.sample(NAMES, 12)
        facts = {}
        for name in names:
            others = rng.sample([other for other in names if other != name], len(VERBS))
            facts[name] = dict(zip(VERBS, others))
        verbs = rng.sample(VERBS, rng.randint(2, 3))
        chain = [rng.choice(names)]
        for verb in verbs:
            chain.append(facts[chain[-1]][verb])
        if len(set(chain)) < len(chain):
            continue
        pages = {}
        for name in names:
            pages[name] = " ".join(f"{name} {verb} {other}." for verb, other in facts[name].items())
        question = f"From {chain[0]} follow {', '.join(verbs)}."
        tasks.append(harness.Task(question, ", ".join(chain[1:]), pages, f"{seed}-{len(tasks)}"))
    return tasks


QUESTION = re.compile(r"From (\w+) follow ([\w, ]+)\.")
FACT = re.compile(rf"\b(\w+) ({'|'.join(VERBS)}) (\w+)\.")
ASKED_FOR_SUMMARY = re.compile(r"(Summarize|Shorter)\.<\|im_end\|>\n<\|im_start\|> *assistant\n$")


class Scripted:
    """A noisy agent that plays the offline world, in the place of an engine. It searches for what it misses,
    answers at times before it knows, and forgets some of it in summaries."""

    def __init__(self, chat, seed=0):
        self.chat = chat
        self.rng = random.Random(seed)
        self.temperature = 1.0

    def load_weights(self, named_tensors):
        """It has none."""

    def reseed(self, seed):
        self.rng.seed(seed)

    def sleep(self):
        """It holds nothing."""

    async def generate(self, token_ids, max_new_tokens, stop):
        ids = self.chat.own(self.write(self.chat.decode(token_ids))) + stop[:1]
        finish = "stop" if len(ids) <= max_new_tokens else "length"
        ids = ids[:max_new_tokens]
        return ids, [0.0] * len(ids), finish

    def write(self, context: str) -> str:
        start, verbs = QUESTION.search(context).groups()
        known = {}
        for name, verb, other in FACT.findall(context):
            known[name, verb] = other
        missing = verbs.split(", ")
        chain = [start]
        facts = []
        while missing and (chain[-1], missing[0]) in known:
            verb = missing.pop(0)
            chain.append(known[chain[-1], verb])
            facts.append(f"{chain[-2]} {verb} {chain[-1]}.")
        if ASKED_FOR_SUMMARY.search(context):
            kept = [fact for fact in facts if self.rng.random() < 0.75]
            return " ".join(kept[:3]) or "No."
        is_subagent = "Report." in context
        if not missing:
            return f"<answer>{' '.join(facts) if is_subagent else ', '.join(chain[1:])}</answer>"
        if not is_subagent and self.rng.random() < 0.05:
            names = chain[1:] + self.rng.choices(NAMES, k=len(missing))
            return f"<answer>{', '.join(names)}</answer>"
        return (facts[-1] if facts else "") + self.next_call(context, chain, missing)

    def next_call(self, context: str, chain: list[str], missing: list[str]) -> str:
        if self.rng.random() < 0.25:  # a needless visit
            return CALL % ("visit", "id", chain[0])
        if "delegate." in context and self.rng.random() < 0.7:
            some = ", ".join(missing[: self.rng.randint(1, 3)])
            return CALL % ("delegate", "task", f"From {chain[-1]} follow {some}.")
        return CALL % ("search", "query", f"{chain[-1]} {missing[0]}")


# ---- Rollouts ----------------------------------------------------------------------------------------------
# Where the project asks for a summary, and where a session begins with one.
FULL = harness.PROMPTS["research"]["compact"][:20]
SUMMARY = harness.PROMPTS["research"]["summary"].strip().splitlines()[-1]
LIMITS = {"max_context": 1500, "max_turn_tokens": 200, "max_response_tokens": 300, "max_summary_tokens": 100}
LIMITS |= {"max_turns": 12, "mode": "single"}
DOCS = {"b": "Mira planted an oak. " * 60}


def attempt(reply, tok=None, docs=None, tools=None, answer="an oak", **limits):
    """One rollout of a policy that writes reply(context), on a question about an oak."""
    tok = tok or tokenizer()
    task = harness.Task("What did Mira plant?", answer, docs or DOCS, "t")
    limits = harness.Limits(**(LIMITS | limits))
    run = harness.rollout(task, Writer(tok, reply), harness.Chat(tok), limits=limits, tools=tools)
    trajectory = asyncio.run(run)
    assert trajectory.stop not in ("error", "infra"), f"the rollout broke off with {trajectory.stop!r}"
    return trajectory


def attempts(tasks, engine, chat, **limits):
    """Trajectories of the offline world, one a task."""
    config = harness.Limits(prompts="offline", **limits)
    return harness.roll_out(tasks, engine, chat, config)


def texts_of(trajectory, tok) -> list[str]:
    """The text of each segment."""
    return [tok.decode(segment.token_ids) for segment in trajectory.segments]


class Notes:
    """Tools that note what they were asked."""

    def __init__(self):
        self.queries = []

    async def search(self, query):
        self.queries.append(query)
        return "[b] Mira planted an oak."

    async def visit(self, id):
        return "Mira planted an oak."


# ---- Programs and refusals ---------------------------------------------------------------------------------
def is_clear(sentence: str, *words: str) -> bool:
    """Whether a refusal is a sentence for users: no exception's name in it, and one of `words`."""
    is_about = not words or any(word in sentence.lower() for word in words)
    is_plain = not re.search(r"[a-z](Error|Exception)\b", sentence)
    return is_about and is_plain and len(sentence.split()) > 4


def write_tasks(folder, *rows: dict) -> str:
    """A file of tasks in that folder -> its path."""
    file = Path(folder, "tasks.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def inputs(folder) -> list[str]:
    """Flags of two tasks and one document, and of limits that suit a small model."""
    Path(folder, "docs").mkdir()
    Path(folder, "docs", "b.txt").write_text("Mira planted an oak.")
    first = {"question": "What did Mira plant?", "answer": "an oak"}
    tasks = write_tasks(folder, first, {"question": "Who?", "answer": "Mira"})
    limits = {
        "max_context": 1500,
        "max_turn_tokens": 24,
        "max_response_tokens": 200,
        "max_summary_tokens": 16,
    }
    flags = [f"--tasks={tasks}", f"--corpus={folder}/docs"]
    for name, value in vars(harness.Limits(**limits, max_turns=2, mode="compaction")).items():
        flags.append(f"--{name.replace('_', '-')}={value}")
    return flags


def run_train(*argv: str) -> None:
    """train.py in this process, which gets its handling of Ctrl-C back."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        train.main(list(argv))
    finally:
        signal.signal(signal.SIGINT, handler)


def lines_of(folder, name: str) -> list[dict]:
    """The rows of a JSONL file of a run."""
    return [json.loads(line) for line in Path(folder, name).read_text().splitlines()]
