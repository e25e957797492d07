"""The harness: what an agent does between a question and a reward, and how it is written down.

A trajectory is a set of sessions (paper, "multi-session trajectories"). This file generates them:

    normal     ReAct over one context: think, call `search` / `visit` / `delegate`, read, ... `<answer>`
    compact    the context is nearly full: one turn writes a summary, the next normal session starts from it
    subagent   a delegated subtask, worked on in a fresh context; its returned text is the tool result

Everything is token-exact: a segment is built by appending the ids that the policy sampled and the ids of
the turns around them; nothing that was sampled is ever decoded and encoded again. Foreign text (questions,
pages, results) is encoded so that it cannot produce a control token.

Left out on purpose: sandboxes, other tools, nested subagents, asynchronous (stale) rollouts.

    python train.py --mode compaction        # the offline world at the end of this file, no GPU
"""

import argparse
import asyncio
import json
import math
import random
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# ---------------------------------------------------------------------------------------------- data model


@dataclass
class Doc:
    id: str
    title: str
    text: str


@dataclass
class Task:
    """A question, its reference answer y*, and in the offline world its own little corpus (None: the web)."""

    question: str
    answer: str
    docs: list[Doc] | None = None
    id: str = ""


@dataclass
class Segment:
    """One linear token sequence, forwarded once in training. The first four lists have its length T."""

    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # True where the policy drew the token
    logprobs: list[float] = field(default_factory=list)  # as drawn; 0 where not sampled
    session: list[int] = field(default_factory=list)  # index of the session that each token belongs to
    turns: list[int] = field(default_factory=list)  # where each of the policy's turns begins

    def append(self, ids: list[int], logprobs: list[float] | None = None) -> int:
        """Add foreign ids, or with `logprobs` ids that the policy drew. Returns the new length."""
        self.token_ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
        return len(self.token_ids)


@dataclass
class Session:
    """A span [start, stop) of a segment, and the two contexts (segment, position) that Phi compares (M7)."""

    kind: str  # normal, compact or subagent
    segment: int
    start: int = 0
    stop: int = 0
    before: tuple[int, int] = (0, 0)
    after: tuple[int, int] = (0, 0)
    phi_before: float = 0.0  # the credit of the session, filled in by train.py and eval.py: M6,
    phi_after: float = 0.0
    gain: float = 0.0  # M7,
    normalised: float = 0.0  # M8,
    advantage: float = 0.0  # and M11


@dataclass
class Trajectory:
    """All sessions of one attempt; the last one states the answer (or is where the attempt ended)."""

    task: Task
    sessions: list[Session] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    answer: str = ""
    reward: float | None = None  # None: the infrastructure failed; never trained as 0
    stop: str = ""  # answer, turns, context, truncated, malformed or infra
    malformed: int = 0  # turns without an answer or a readable call


def option(default, help: str):
    """A dataclass field with the sentence that `--help` prints."""
    return field(default=default, metadata={"help": help})


def flag_parser(config, choices: dict[str, tuple], text: str) -> argparse.ArgumentParser:
    """A parser with one flag per field of a dataclass; flags that are not given do not appear in its result."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for f in fields(config):
        flag, text = "--" + f.name.replace("_", "-"), f"{f.metadata['help']} ({f.default!r})"
        keys = {"help": text.replace("%", "%%"), "dest": f.name, "default": argparse.SUPPRESS}
        if f.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **keys)
        else:
            parser.add_argument(flag, type=f.type, choices=choices.get(f.name), **keys)
    return parser


@dataclass
class Limits:
    """Budgets of one trajectory. Counted in tokens of the policy's tokenizer, turns, sessions and calls."""

    max_context: int = option(3072, "tokens that a context may never exceed")
    compact_at: float = option(1.0, "compact when context + one turn pass this fraction of max_context")
    max_turn_tokens: int = option(256, "tokens that the policy may sample in one turn")
    max_response_tokens: int = option(512, "tokens of all tool responses to one turn")
    max_summary_tokens: int = option(192, "tokens of a summary")
    max_turns: int = option(16, "turns of the main agent, over all its sessions")
    max_subagent_turns: int = option(6, "turns of one subagent")
    max_sessions: int = option(9, "sessions of a trajectory, of all kinds")
    max_calls: int = option(32, "tool calls of a trajectory")
    max_parallel_calls: int = option(4, "tool calls of one turn; more make the turn malformed")
    top_k: int = option(3, "documents that a search of a corpus returns")
    max_malformed: int = option(4, "malformed turns after which a trajectory ends")
    prompts: str = option("research", "the wording of the instructions: research or offline")


class InfraError(Exception):
    """Search or judge stayed down through all retries: the trajectory gets reward None."""


# ------------------------------------------------------------------------------------------ tasks and corpora


def read_jsonl(path: str | Path) -> list[tuple[int, dict]]:
    """(line number, object) of each line of a JSONL file. ValueError names the file and line that is wrong."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a readable UTF-8 file of JSON lines ({error})") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: expected one JSON object a line ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")
        rows.append((number, row))
    if not rows:
        raise ValueError(f"{path}: expected at least one JSON line, found none")
    return rows


def text_of(row: dict, key: str, where: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str) or not (value.strip() or value == default):
        raise ValueError(f"{where}: expected a non-empty string {key!r}, found {value!r}")
    return value.strip()


def load_tasks(path: str | Path) -> list[Task]:
    """Tasks of a JSONL file with `question` (or `problem`), `answer` and optionally a unique `id`."""
    tasks = []
    seen = set()
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        question = text_of(row, "problem" if "problem" in row else "question", where)
        task = Task(question, text_of(row, "answer", where), id=str(row.get("id", number)))
        if task.id in seen:
            raise ValueError(f"{where}: expected unique ids, found {task.id!r} a second time")
        seen.add(task.id)
        tasks.append(task)
    return tasks


def load_corpus(path: str | Path) -> list[Doc]:
    """Documents of a JSONL file (`id`, `title`, `text`) or of a folder of .txt and .md files."""
    path = Path(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".md"))
        texts = [(p, p.read_text(encoding="utf-8", errors="replace")) for p in files]
        docs = [Doc(str(p.relative_to(path)), p.stem, text) for p, text in texts if text.strip()]
        if not docs:
            raise ValueError(f"{path}: expected a folder with .txt or .md files that hold text, found none")
        return docs
    docs = {}
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        key = text_of(row, "id", where)
        if key in docs:
            raise ValueError(f"{where}: expected unique ids, found {key!r} a second time")
        docs[key] = Doc(key, text_of(row, "title", where, default=""), text_of(row, "text", where))
    return list(docs.values())


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Corpus:
    """`search` and `visit` over documents in memory, ranked by BM25 (k1 = 1.2, b = 0.75)."""

    def __init__(self, docs: list[Doc], top_k: int = 3):
        self.docs = {doc.id: doc for doc in docs}
        self.top_k = top_k
        self.counts = {doc.id: Counter(words_of(f"{doc.title} {doc.text}")) for doc in docs}
        self.lengths = {id: sum(counts.values()) for id, counts in self.counts.items()}
        self.mean_length = sum(self.lengths.values()) / len(docs)
        self.postings = {}
        for id, counts in self.counts.items():
            for word in counts:
                self.postings.setdefault(word, []).append(id)

    def idf(self, word: str) -> float:
        n = len(self.postings.get(word, ()))
        return math.log(1 + (len(self.docs) - n + 0.5) / (n + 0.5))

    async def search(self, query: str) -> str:
        """The best documents, a line each: [id] title: the sentence that matches the query best."""
        query_words = set(words_of(query))
        scores = Counter()
        for word in query_words:
            for id in self.postings.get(word, ()):
                tf = self.counts[id][word]
                norm = 1.2 * (0.25 + 0.75 * self.lengths[id] / self.mean_length)
                scores[id] += self.idf(word) * tf * 2.2 / (tf + norm)
        best = sorted(scores, key=lambda id: (-scores[id], id))[: self.top_k]
        return "\n".join(self.snippet(self.docs[id], query_words) for id in best) or "No result."

    def snippet(self, doc: Doc, query_words: set[str]) -> str:
        sentences = re.split(r"(?<=[.!?])\s+", doc.text.strip())
        best = max(sentences, key=lambda s: sum(self.idf(w) for w in query_words & set(words_of(s))))
        title = f"{doc.title}: " if doc.title else ""
        return f"[{doc.id}] {title}{best[:400]}"

    async def visit(self, id: str) -> str:
        doc = self.docs.get(id)
        return "Error: unknown page." if doc is None else f"{doc.title}\n{doc.text}".strip()


# --------------------------------------------------------------------------- prompts and the chat template

RESEARCH_TOOLS = """\
Think step by step. To use a tool, write one or more calls, then end your turn and wait for the results:
<tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>
Tools: search(query) finds pages and shows one line of each; visit(id) reads the page with that id"""

PROMPTS = {
    "research": {
        "single": f"You research the answer to a question. {RESEARCH_TOOLS}.\n"
        "When you know the answer, write only it between <answer> and </answer>.",
        "delegate": f"You research the answer to a question. {RESEARCH_TOOLS}; delegate(task) hands a subtask,"
        " described completely, to an assistant who starts from nothing and reports back.\n"
        "When you know the answer, write only it between <answer> and </answer>.",
        "subagent": f"You work on one subtask for a colleague. {RESEARCH_TOOLS}.\n"
        "When you are done, write what you found, complete and short, between <answer> and </answer>.",
        "compact": "Your context is full and will be cleared. Write a summary from which you can go on: what you"
        " know for certain and from where, what failed, and what is to be done next. Write nothing else.",
        "shorter": "That was too long and was cut off. Write the summary again in half as many words.",
        "summary": "\n\nYou have worked on this before. Your summary:\n",
    },
    "offline": {
        "single": "Tools: search, visit.",
        "delegate": "Tools: search, visit, delegate.",
        "subagent": "Report. Tools: search, visit.",
        "compact": "Summarize.",
        "shorter": "Shorter.",
        "summary": "Summary:",
    },
}


@dataclass
class Chat:
    """A tokenizer's chat template, cut once into exact token pieces."""

    tokenizer: object
    head: tuple[str, str]  # the text before the system prompt, and between it and the question
    user_open: list[int]
    close: list[int]  # ends any turn; the policy samples the first of these ids to end its own
    generation: list[int]  # opens the policy's turn
    cue: list[int]  # the fixed answer cue of M6: opens a turn and its <answer>
    control: set[int]  # ids that foreign text may never produce
    control_text: re.Pattern

    def own(self, text: str) -> list[int]:
        """Ids of text that we wrote ourselves: control tokens are meant."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def foreign(self, text: str, max_tokens: int = 1 << 30) -> list[int]:
        """Ids of text that others wrote: every spelled control token is cut in two before encoding."""
        text = text[: 32 * max_tokens].encode("utf-8", "replace").decode()
        cuts = [0] + [match.start() + 1 for match in self.control_text.finditer(text)] + [len(text)]
        pieces = [text[a:b] for a, b in zip(cuts, cuts[1:])]
        ids = [i for piece in pieces if piece for i in self.own(piece)]
        return [i for i in ids if i not in self.control][:max_tokens]

    def prompt(self, system: str, question: list[int]) -> list[int]:
        """The head of a segment: system prompt and first user turn."""
        return self.own(self.head[0] + system + self.head[1]) + question + self.close

    def user(self, ids: list[int]) -> list[int]:
        return self.user_open + ids + self.close

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def make_chat(tokenizer) -> Chat:
    """Cut the tokenizer's chat template at placeholders. ValueError: no template, or one without such turns."""
    if tokenizer.chat_template is None:
        raise ValueError(f"{tokenizer.name_or_path}: expected a tokenizer with a chat template, found none")
    marks = ["@@system@@", "@@user@@", "@@assistant@@", "@@next@@"]
    roles = ["system", "user", "assistant", "user"]
    turns = [{"role": role, "content": mark} for role, mark in zip(roles, marks)]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    if any(text.count(mark) != 1 for mark in marks):
        raise ValueError(f"{tokenizer.name_or_path}: expected a chat template that shows every turn once")
    before, to_user, _, to_next, close = re.split("|".join(marks), text)
    short = tokenizer.apply_chat_template(turns[:2], tokenize=False)
    opened = tokenizer.apply_chat_template(turns[:2], tokenize=False, add_generation_prompt=True)
    generation = opened[len(short) :]
    if not to_next.startswith(close) or not generation:
        raise ValueError(f"{tokenizer.name_or_path}: expected a chat template that ends all turns alike")
    # A template that opens the policy's turn with <think> gets its thought closed again before the answer.
    cue = generation + ("\n</think>\n\n" if generation.rstrip().endswith("<think>") else "") + "<answer>"
    added = set(tokenizer.get_added_vocab()) | set(tokenizer.all_special_tokens)
    # critical: a lookahead finds overlapping spellings too; a consuming match would leave the second whole.
    pattern = "(?=" + "|".join(re.escape(t) for t in sorted(added, key=len, reverse=True)) + ")"
    chat = Chat(tokenizer, (before, to_user), [], [], [], [], set(), re.compile(pattern))
    chat.control = set(tokenizer.convert_tokens_to_ids(sorted(added)))
    chat.user_open = chat.own(to_next.removeprefix(close))
    chat.close = chat.own(close)
    chat.generation = chat.own(generation)
    chat.cue = chat.own(cue)
    return chat


# ------------------------------------------------------------------------------------------------- engines


def load_policy(source: str):
    """(model in float32, tokenizer) of a folder or hub id. ValueError says what the folder lacks."""
    if source.startswith((".", "/", "runs/")) and not (Path(source) / "config.json").exists():
        raise ValueError(
            f"--model {source}: expected a folder with a config.json, as save_pretrained writes it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), tokenizer
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {source}: expected a model and its tokenizer ({error})") from None


class HFEngine:
    """All waiting requests in one left-padded KV-cache loop: for CPUs, and for checking other engines."""

    def __init__(self, model, pad_id: int = 0, temperature: float = 1.0, seed: int = 0, max_batch: int = 128):
        self.model = model
        self.pad_id = pad_id
        self.temperature = temperature  # 0: greedy
        self.generator = torch.Generator(model.device).manual_seed(seed)
        self.max_batch = max_batch
        self.waiting = []
        self.drain = None

    def load_weights(self, named_tensors) -> None:
        """Nothing to do where engine and trainer share the model; a copy is updated in place."""
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in named_tensors:
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)

    async def generate(self, token_ids: list[int], max_new_tokens: int, stop: list[int]):
        """-> (sampled ids, their log-probs, "stop" or "length"); the stop token is sampled too."""
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((token_ids, max_new_tokens, set(stop), future))
        if self.drain is None:
            self.drain = asyncio.create_task(self.run_waiting())
        return await future

    async def run_waiting(self) -> None:
        # Give every other rollout the time to ask too. The event loop is deterministic, so batches are.
        seen, calm = 0, 0
        while calm < 5:
            await asyncio.sleep(0)
            calm = calm + 1 if len(self.waiting) == seen else 0
            seen = len(self.waiting)
        batch, self.waiting, self.drain = self.waiting, [], None
        for start in range(0, len(batch), self.max_batch):
            part = batch[start : start + self.max_batch]
            try:
                results = self.sample([request[:3] for request in part])
            except Exception as error:
                for *_, future in part:
                    future.set_exception(error)
                continue
            for (*_, future), result in zip(part, results):
                future.set_result(result)

    @torch.no_grad()
    def sample(
        self, requests: list[tuple[list[int], int, set[int]]]
    ) -> list[tuple[list[int], list[float], str]]:
        device = self.model.device
        longest = max(len(ids) for ids, _, _ in requests)
        rows = [[self.pad_id] * (longest - len(ids)) + ids for ids, _, _ in requests]
        input_ids = torch.tensor(rows, device=device)
        mask = torch.tensor(
            [[0] * (longest - len(ids)) + [1] * len(ids) for ids, _, _ in requests], device=device
        )
        # critical: without positions that start at the first real token, left padding shifts every row.
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        results = [([], [], "length") for _ in requests]
        alive = set(range(len(requests)))
        one = torch.ones_like(mask[:, :1])
        while alive:
            out = self.model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logprobs = (out.logits[:, -1].float() / (self.temperature or 1.0)).log_softmax(-1)
            if self.temperature == 0:
                drawn = logprobs.argmax(-1, keepdim=True)
            else:
                drawn = torch.multinomial(logprobs.exp(), 1, generator=self.generator)
            drawn_logprobs = logprobs.gather(1, drawn).squeeze(1).tolist()
            for i, (token, logprob) in enumerate(zip(drawn.squeeze(1).tolist(), drawn_logprobs)):
                if i not in alive:
                    continue
                ids, logps, _ = results[i]
                ids.append(token)
                logps.append(logprob)
                if token in requests[i][2]:
                    results[i] = (ids, logps, "stop")
                    alive.discard(i)
                elif len(ids) == requests[i][1]:
                    alive.discard(i)
            input_ids = drawn
            mask = torch.cat([mask, one], dim=1)
            positions = positions[:, -1:] + 1
        return results


# --------------------------------------------------------------------------------------------- the agent

TOOLS = {"search": "query", "visit": "id", "delegate": "task"}  # each tool and its one argument
MODES = ("single", "compaction", "subagent", "both")


def parse_call(text: str) -> tuple[str, str] | None:
    """(tool, argument) of the inside of one <tool_call>, in either spelling; None if it is malformed."""
    match = re.fullmatch(
        r"\s*<function=(\w+)>\s*<parameter=(\w+)>(.*?)</parameter>\s*</function>\s*", text, re.S
    )
    if match:
        name, arguments = match[1], {match[2]: match[3].strip()}
    else:
        try:
            call = json.loads(text)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
    if not isinstance(name, str) or name not in TOOLS or not isinstance(arguments, dict):
        return None
    value = arguments.get(TOOLS[name])
    return (name, value.strip()) if isinstance(value, str) and value.strip() else None


def parse_turn(text: str) -> tuple[str, list[tuple[str, str] | None]]:
    """(answer or "", calls) of one turn of the policy; what it thought is not searched for either."""
    text = text.rsplit("</think>", 1)[-1]
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.S)
    calls = [parse_call(inside) for inside in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.S)]
    if text.count("<tool_call>") > len(calls):
        calls.append(None)  # opened and never closed
    return (answers[-1].strip() if answers else ""), calls


@dataclass
class Run:
    """What the coroutines of one trajectory share."""

    trajectory: Trajectory
    engine: object
    chat: Chat
    mode: str
    limits: Limits
    tools: object
    prompts: dict[str, str]
    sessions: int = 0  # opened so far, of all kinds
    calls: int = 0


def compact_reserve(run: Run) -> int:
    """Tokens that a compact session may add: an instruction and a summary, and once more the shorter try."""
    if run.mode not in ("compaction", "both"):
        return 0
    words = [run.chat.own(run.prompts[key]) for key in ("compact", "shorter")]
    around = 2 * len(run.chat.user([])) + 2 * len(run.chat.generation) + 2 * len(run.chat.close)
    return sum(map(len, words)) + around + run.limits.max_summary_tokens + run.limits.max_summary_tokens // 2


def turn_reserve(run: Run) -> int:
    """Tokens that one turn with its tool responses may add."""
    around = len(run.chat.generation) + len(run.chat.close)
    return around + run.limits.max_turn_tokens + run.limits.max_response_tokens


def context_limit(run: Run) -> int:
    """Where a session has to end: the limit itself, or where compaction is to start."""
    compacts = run.mode in ("compaction", "both")
    return int(run.limits.max_context * (run.limits.compact_at if compacts else 1.0))


def main_prompt(run: Run, summary: list[int]) -> list[int]:
    system = run.prompts["delegate" if run.mode in ("subagent", "both") else "single"]
    return run.chat.prompt(system, run.chat.foreign(run.trajectory.task.question) + summary)


def open_segment(run: Run, prompt: list[int]) -> tuple[int, Segment]:
    run.sessions += 1
    segment = Segment()
    segment.append(prompt)
    run.trajectory.segments.append(segment)
    return len(run.trajectory.segments) - 1, segment


async def sample_turn(run: Run, segment: Segment, max_new_tokens: int) -> tuple[list[int], str]:
    """One turn of the policy, appended as drawn; what closes it is ours. -> (sampled ids, finish reason)."""
    segment.turns.append(len(segment.token_ids))
    segment.append(run.chat.generation)
    ids, logprobs, finish = await run.engine.generate(
        segment.token_ids[:], max_new_tokens, run.chat.close[:1]
    )
    segment.append(ids, logprobs)
    segment.append(run.chat.close[1:] if finish == "stop" else run.chat.close)
    return ids, finish


async def react(run: Run, index: int, tools: list[str], max_turns: int, reserve: int) -> tuple[str, str]:
    """ReAct in one segment until it ends. -> (why: answer, turns, context, truncated or malformed; answer)."""
    segment = run.trajectory.segments[index]
    for _ in range(max_turns):
        if len(segment.token_ids) + turn_reserve(run) + reserve > context_limit(run):
            return "context", ""
        ids, finish = await sample_turn(run, segment, run.limits.max_turn_tokens)
        if finish == "length":
            return "truncated", ""
        answer, calls = parse_turn(run.chat.decode(ids))
        if answer:
            return "answer", answer
        too_many = len(calls) > run.limits.max_parallel_calls
        if too_many or not calls or None in calls:
            run.trajectory.malformed += 1
            if run.trajectory.malformed >= run.limits.max_malformed:
                return "malformed", ""
        if too_many or not calls:
            calls = [None]
        await respond(run, index, calls, tools)
    return "turns", ""


def response_turn(chat: Chat, ids: list[int]) -> list[int]:
    return chat.user(chat.own("<tool_response>\n") + ids + chat.own("\n</tool_response>"))


async def respond(run: Run, index: int, calls: list, tools: list[str]) -> None:
    """Run the calls of one turn concurrently and append their responses in call order, a user turn each."""
    segment = run.trajectory.segments[index]
    room = run.limits.max_response_tokens // len(calls) - len(response_turn(run.chat, []))
    results = await asyncio.gather(*[call_tool(run, call, tools) for call in calls])
    for text, session in results:
        before = (index, len(segment.token_ids))
        segment.append(response_turn(run.chat, run.chat.foreign(text, room)))
        if session is not None:  # M7: a fork's gain is that of merging its result into the main context
            session.before, session.after = before, (index, len(segment.token_ids))
            run.trajectory.sessions.append(session)


async def call_tool(run: Run, call: tuple[str, str] | None, tools: list[str]) -> tuple[str, Session | None]:
    """-> (the response, the subagent's session if it was a fork)."""
    if call is None:
        return "Error: malformed call.", None
    name, argument = call
    if name not in tools:
        return "Error: unknown tool.", None
    run.calls += 1
    if run.calls > run.limits.max_calls:
        return "Error: no calls left.", None
    if name == "delegate":
        return await delegate(run, argument)
    return await getattr(run.tools, name)(argument), None


async def delegate(run: Run, task: str) -> tuple[str, Session | None]:
    """A subagent: a fresh context with its own tools and budget, and no forks of its own."""
    if run.sessions >= run.limits.max_sessions:
        return "Error: no sessions left.", None
    system = run.prompts["subagent"]
    room = run.limits.max_context - turn_reserve(run) - len(run.chat.prompt(system, []))
    index, segment = open_segment(run, run.chat.prompt(system, run.chat.foreign(task, room)))
    why, answer = await react(run, index, ["search", "visit"], run.limits.max_subagent_turns, 0)
    return (answer if why == "answer" else "No result."), Session(
        "subagent", index, 0, len(segment.token_ids)
    )


async def compact(run: Run, index: int) -> list[int] | None:
    """The compact session continues the very context it summarises. -> the summary's ids; None: cut off twice."""
    segment = run.trajectory.segments[index]
    run.sessions += 1
    for key, share in (("compact", 1), ("shorter", 2)):
        segment.append(run.chat.user(run.chat.own(run.prompts[key])))
        ids, finish = await sample_turn(run, segment, run.limits.max_summary_tokens // share)
        if finish == "stop":
            think_end = run.chat.tokenizer.convert_tokens_to_ids("</think>")
            thought = len(ids) - ids[::-1].index(think_end) if think_end in ids else 0
            return [i for i in ids[thought:] if i not in run.chat.control]
    return None


async def main_agent(run: Run) -> None:
    """Normal sessions, joined by compact ones where the mode has them. Fills sessions, answer and stop."""
    trajectory = run.trajectory
    tools = ["search", "visit"] + (["delegate"] if run.mode in ("subagent", "both") else [])
    reserve = compact_reserve(run)
    turns_left = run.limits.max_turns
    prompt = main_prompt(run, [])
    while True:
        index, segment = open_segment(run, prompt)
        session = Session("normal", index, before=(index, len(prompt)))
        trajectory.stop, trajectory.answer = await react(run, index, tools, turns_left, reserve)
        turns_left -= len(segment.turns)
        session.stop = len(segment.token_ids)
        session.after = (index, session.stop)
        trajectory.sessions.append(session)
        if trajectory.stop != "context" or not reserve or run.sessions + 2 > run.limits.max_sessions:
            return
        compacted = Session("compact", index, start=session.stop, before=session.after)
        trajectory.sessions.append(compacted)
        summary = await compact(run, index)
        compacted.stop = len(segment.token_ids)
        if summary is None:
            compacted.after = (index, compacted.stop)
            trajectory.stop = "truncated"
            return
        prompt = main_prompt(run, run.chat.own(run.prompts["summary"]) + summary)
        compacted.after = (len(trajectory.segments), len(prompt))


def make_run(task: Task, engine, chat: Chat, mode: str, limits: Limits, tools) -> Run:
    """The state of a rollout that has not begun. ValueError unless prompt, a summary and one turn fit."""
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: expected one of {', '.join(MODES)}")
    run = Run(Trajectory(task), engine, chat, mode, limits, tools, PROMPTS[limits.prompts])
    prompt = len(main_prompt(run, []))
    summary = len(run.chat.own(run.prompts["summary"])) + limits.max_summary_tokens
    need = prompt + turn_reserve(run) + compact_reserve(run) + (summary if compact_reserve(run) else 0)
    if need > context_limit(run):
        raise ValueError(
            f"--max-context {limits.max_context}: expected room for the prompt ({prompt} tokens), one turn and a "
            f"summary, together {need}, of task {task.id!r}"
        )
    response = 4 + len(response_turn(run.chat, []))
    if limits.max_response_tokens < limits.max_parallel_calls * response:
        raise ValueError(
            f"--max-response-tokens {limits.max_response_tokens}: expected at least "
            f"{limits.max_parallel_calls * response} for {limits.max_parallel_calls} parallel calls"
        )
    return run


def normalise_answer(text: str) -> str:
    """Lower case, letters and digits only, no English articles, single spaces."""
    words = re.sub(r"[^\w\s]", " ", text.lower()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


async def exact_match(task: Task, answer: str) -> float:
    return float(normalise_answer(answer) == normalise_answer(task.answer))


async def rollout(
    task: Task,
    engine,
    tokenizer,
    mode: str,
    limits: Limits | None = None,
    tools=None,
    judge=exact_match,
) -> Trajectory:
    """One attempt at a task.

    Args:
        engine: has `async generate(token_ids, max_new_tokens, stop) -> (ids, logprobs, finish_reason)`.
        tokenizer: a transformers tokenizer with a chat template, or the `Chat` made of one.
        mode: single, compaction, subagent or both.
        tools: has `async search(query)` and `async visit(id)`; None: a `Corpus` over `task.docs`.
        judge: `async (task, answer) -> reward`.
    Raises:
        ValueError: the mode is unknown, or the prompt does not fit `limits.max_context`.
    """
    if tools is None and not task.docs:
        raise ValueError(f"task {task.id!r}: expected tools, or documents of its own to search in")
    limits = limits or Limits()
    chat = tokenizer if isinstance(tokenizer, Chat) else make_chat(tokenizer)
    run = make_run(task, engine, chat, mode, limits, tools or Corpus(task.docs, limits.top_k))
    trajectory = run.trajectory
    try:
        await main_agent(run)
        trajectory.reward = await judge(task, trajectory.answer) if trajectory.stop == "answer" else 0.0
    except InfraError:
        trajectory.stop = "infra"
    for j, session in enumerate(trajectory.sessions):
        segment = trajectory.segments[session.segment]
        segment.session += [j] * (session.stop - len(segment.session))
    return trajectory


# -------------------------------------------------------------------------------------- the offline world
#
# Ours, not the paper's: everything that a laptop needs to see the method learn. A task is a chain of facts
# ("Mira taught Tolo. Tolo hired Venn."); its names and facts are drawn anew, so nothing can be memorised.
# The answer is the chain of names, so that Phi can follow a trajectory hop by hop.

NAMES = (
    "Ada Bela Cato Dino Edda Fynn Gaia Hugo Iris Jona Kara Lino Mira Nils Orla Pax Quin Rhea Sven Tolo Ugo Vera "
    "Wim Xena Yara Zeno Alma Bodo Cleo Dora Emil Fria Gero Hedy Ivar Juno Kian Luna Milo Nora"
).split()
VERBS = "taught hired saved paid married painted".split()
FACT = re.compile(rf"(\w+) ({'|'.join(VERBS)}) (\w+)\.")
ENTITIES = 12
SUMMARY_FACTS = 3


def offline_tasks(n: int, seed: int, split: str = "train", hops: tuple[int, int] = (2, 4)) -> list[Task]:
    """`n` tasks with 12 pages each. No chain of names can be in both splits: its checksum decides which."""
    rng = random.Random(f"{split} {seed}")
    tasks = []
    while len(tasks) < n:
        names = rng.sample(NAMES, ENTITIES)
        facts = {}
        for name in names:
            objects = rng.sample([other for other in names if other != name], len(VERBS))
            facts.update({(name, verb): object for verb, object in zip(VERBS, objects)})
        chain = [rng.choice(names)]
        verbs = rng.sample(VERBS, rng.randint(*hops))
        for verb in verbs:
            chain.append(facts[chain[-1], verb])
        held_out = zlib.crc32(" ".join(chain).encode()) % 5 == 0
        if len(set(chain)) < len(chain) or held_out != (split == "held-out"):
            continue
        docs = []
        for name in names:
            sentences = [f"{name} {verb} {facts[name, verb]}." for verb in VERBS]
            rng.shuffle(sentences)
            docs.append(Doc(name, "", " ".join(sentences)))
        question = f"From {chain[0]} follow {', '.join(verbs)}."
        tasks.append(Task(question, ", ".join(chain[1:]), docs, id=f"{split}-{seed}-{len(tasks)}"))
    return tasks


def offline_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer with a chat template of Qwen's form. JSON scaffolding is one token a tool."""
    control = (
        "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> </tool_response>"
    )
    control = control.split() + ["<answer>", "</answer>"]
    calls = [f'{{"name": "{name}", "arguments": {{"{argument}": "' for name, argument in TOOLS.items()]
    ours = "No result Error malformed call unknown tool page no calls sessions left From follow"
    words = ours.split() + re.findall(r"\w+", " ".join(PROMPTS["offline"].values()))
    marks = ["<unk>", '"}}', "system\n", "user\n", "assistant\n", "\n"] + list(".,:[]")
    vocab = list(dict.fromkeys(control + calls + marks + words + VERBS + NAMES))
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocab)}, unk_token="<unk>"))
    piece = r'\{"name": "\w+", "arguments": \{"\w+": "|"\}\}|(?:system|user|assistant)\n|\w+|[^\w ]'
    core.pre_tokenizer = pre_tokenizers.Split(Regex(piece), "removed", invert=True)
    space = decoders.Replace(Regex(r"^(?=\w)"), " ")
    tight = [decoders.Replace(opening + " ", opening) for opening in ('"', "[", ">", "\n")]
    core.decoder = decoders.Sequence([space, decoders.Fuse(), *tight])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=control[1:2] + control[3:],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def offline_model(vocab_size: int, seed: int) -> Qwen3ForCausalLM:
    """A tiny Qwen3 of 209,000 parameters, randomly initialised."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    # At this width the library's standard deviation of 0.02 keeps the copy circuit from forming for thousands
    # of steps; wider weights need a few hundred.
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.08)
        elif isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.5)
    return model


@dataclass
class Demonstrator:
    """A noisy scripted agent behind the interface of an engine: it reads a context and writes the next turn."""

    chat: Chat
    seed: int
    waste: float = 0.25  # makes a needless search or visit
    keep: float = 0.75  # keeps a useful fact in a summary
    junk: float = 0.5  # fills a spare slot of a summary
    early: float = 0.04  # answers before it knows
    wrong: float = 0.05  # gets a name of the answer wrong

    def __post_init__(self):
        self.rng = random.Random(self.seed)

    async def generate(self, token_ids: list[int], max_new_tokens: int, stop: list[int]):
        ids = self.chat.own(self.write(self.chat.decode(token_ids))) + stop[:1]
        finish = "stop" if len(ids) <= max_new_tokens else "length"
        ids = ids[:max_new_tokens]
        return ids, [0.0] * len(ids), finish

    def write(self, context: str) -> str:
        rng = self.rng
        start, verbs = re.search(r"From (\w+) follow ([\w, ]+)\.", context).groups()
        verbs = verbs.split(", ")
        known = {(a, verb): b for a, verb, b in FACT.findall(context)}
        chain = [start]
        for verb in verbs:
            if (chain[-1], verb) not in known:
                break
            chain.append(known[chain[-1], verb])
        facts = [f"{a} {verb} {b}." for a, verb, b in zip(chain, verbs, chain[1:])]
        last_user_turn = context.rsplit("user\n", 1)[1]
        if "Summarize." in last_user_turn or "Shorter." in last_user_turn:
            return self.summary(facts, [f"{a} {verb} {b}." for (a, verb), b in known.items()])
        done = len(facts) == len(verbs)
        if "Report." in context:
            if done:
                return f"<answer>{' '.join(facts)}</answer>"
        elif done or rng.random() < self.early:
            names = chain[1:] + rng.choices(NAMES, k=len(verbs) - len(facts))
            if rng.random() < self.wrong:
                names[rng.randrange(len(names))] = rng.choice(NAMES)
            return f"<answer>{', '.join(names)}</answer>"
        thought = facts[-1] if facts else ""
        return thought + self.call(context, chain[-1], verbs[len(facts) :], list(known))

    def summary(self, useful: list[str], seen: list[str]) -> str:
        kept = [fact for fact in useful if self.rng.random() < self.keep][:SUMMARY_FACTS]
        others = [fact for fact in seen if fact not in useful]
        while len(kept) < SUMMARY_FACTS and others and self.rng.random() < self.junk:
            kept.append(others.pop(self.rng.randrange(len(others))))
        return " ".join(kept)

    def call(self, context: str, name: str, verbs: list[str], seen: list[tuple[str, str]]) -> str:
        rng = self.rng
        tool, argument = "search", f"{name} {verbs[0]}"
        if rng.random() < self.waste:
            other = rng.choice([a for a, _ in seen] or [name])
            tool, argument = rng.choice([("search", f"{other} {rng.choice(VERBS)}"), ("visit", other)])
        elif "delegate." in context and rng.random() < 0.7:
            tool, argument = "delegate", f"From {name} follow {', '.join(verbs[: rng.randint(1, 3)])}."
        call = json.dumps({"name": tool, "arguments": {TOOLS[tool]: argument}})
        return f"<tool_call>{call}</tool_call>"
