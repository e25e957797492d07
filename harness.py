"""The harness: what an agent does between a question and a reward. A trajectory is a set of sessions:
    normal     ReAct over one context: think, call tools, read what they return, ... `<answer>`
    compact    the context is nearly full: one turn writes a summary, and a normal session starts from it
    subagent   a delegated subtask, worked on in a fresh context; the text it returns is the tool's result
A segment is one linear token sequence. It grows by the ids that the policy sampled and by those of the turns
around them. Foreign text (questions, pages, reports) cannot produce a token that structures a turn.
Shapes: T tokens of a segment, B requests sampled together, V vocabulary. Left out: sandboxes, nested forks.
"""

import asyncio
import inspect
import json
import math
import os
import random
import re
import sys
import tempfile
import time
import traceback
import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import count, pairwise
from pathlib import Path
from typing import Literal, get_args

import regex
import requests
import torch
from requests.adapters import HTTPAdapter, Retry
from torch.nn.utils.rnn import pad_sequence
from tqdm.asyncio import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.hf_argparser import HfArg, HfArgumentParser
from transformers.utils import logging
from urllib3.exceptions import HTTPError

WORLD = Path(__file__).parent / ".world"  # tasks, tiny policies, prompts and presets, all plain files
PROMPTS = json.loads((WORLD / "prompts.json").read_text())
PRESETS = json.loads((WORLD / "presets.json").read_text())
Mode = Literal["single", "compaction", "subagent", "both"]
COMPACTING = ("compaction", "both")
FORKING = ("subagent", "both")
MALFORMED = ("", {})  # in the place of a call that cannot be read
MOST_MALFORMED = 4  # malformed turns of a trajectory at which its agent ends
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]  # they structure a turn
MARKS = [*TAGS, "<think>", "</think>", "<answer>", "</answer>"]
# The least values of flags whose least is not 1, or for fractions just above 0.
LEAST = dict.fromkeys("rho lam beta0 beta1 clip_low clip_high eval_tasks seed line".split(), 0)
LEAST |= {"max_summary_tokens": 2, "group_size": 2}


class UserError(ValueError):
    """What was asked for cannot be done: its sentence says why, and the programs end with it."""


def expect(condition, sentence):
    if not condition:
        raise UserError(sentence)


def require(config, name, holds, expected):
    expect(holds, f"--{name.replace('_', '-')} {getattr(config, name)}: expected {expected}")


# ---- Data model --------------------------------------------------------------------------------------------
@dataclass
class Task:
    question: str
    answer: str  # the reference answer, y*
    docs: dict[str, str] | None = None  # offline world: its own documents, id -> text
    id: str = ""
    extra: dict = field(default_factory=dict)  # all fields of its line, for a reward that needs more


@dataclass
class Segment:  # one linear token sequence, forwarded once; in the end all but `turns` have length T
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # True where the policy drew the token
    logprobs: list[float] = field(default_factory=list)  # as drawn; 0 where not sampled
    session: list[int] = field(default_factory=list)  # index of the session that the token belongs to
    advantage: list[float] = field(default_factory=list)  # written by train.py, credit
    turns: list[int] = field(default_factory=list)  # positions at which the policy's turns begin

    def append(self, ids, logprobs=None):  # with log-probs what the policy drew, without what it did not
        self.token_ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


@dataclass
class Session:  # a span [start, stop) of a segment; what is None was not computed
    kind: str  # normal, compact or subagent
    segment: int
    start: int
    stop: int
    before: tuple[int, int] | None = None  # (segment, position) of the context before it, M7
    after: tuple[int, int] | None = None  # and of the context after it
    phi_before: float | None = None  # M6, written by phi.py
    phi_after: float | None = None
    gain: float | None = None  # M7, written by eval.py
    normalised: float | None = None  # M8, written by train.py
    advantage: float | None = None  # M11, written by train.py


@dataclass
class Trajectory:  # all sessions of one attempt; the last one answers, or is where it ended
    task: Task
    reference_ids: list[int]  # the tokens of y*, for Phi
    sessions: list[Session] = field(default_factory=list)  # as they end: a fork before who sent it
    segments: list[Segment] = field(default_factory=list)
    answer: str = ""
    reward: float | None = None  # None: search or judge was down, or an error; never trained as 0
    stop: str = ""  # answer, turns, context, truncated, malformed, infra or error
    malformed: int = 0  # turns with neither an answer nor calls that can all be read

    def main_turns(self):
        """(segment, start, stop) of each turn of the main agent, with what it was answered."""
        turns = []
        for index in [session.segment for session in self.sessions if session.kind == "normal"]:
            edges = [*self.segments[index].turns, len(self.segments[index].token_ids)]
            turns += [(index, start, stop) for start, stop in pairwise(edges)]
        return turns


# ---- Limits and flags --------------------------------------------------------------------------------------
@dataclass
class Limits:  # mode and budgets of a trajectory, as flags of train.py and eval.py
    mode: Mode = HfArg(default="compaction", help="how a trajectory may go beyond one context")
    prompts: Literal["offline", "research"] = HfArg(default="research", help="wording of the instructions")
    max_context: int = HfArg(default=220, help="tokens that a context may never exceed")
    max_turn_tokens: int = HfArg(default=24, help="tokens that the policy may sample in a turn")
    max_response_tokens: int = HfArg(default=44, help="tokens of all tool responses to a turn")
    max_summary_tokens: int = HfArg(default=19, help="tokens of a summary")
    max_turns: int = HfArg(default=40, help="turns of the main agent in all its sessions, summaries apart")
    max_subagent_turns: int = HfArg(default=3, help="turns of a subagent")
    max_sessions: int = HfArg(default=25, help="sessions of a trajectory")
    max_parallel_calls: int = HfArg(default=2, help="tool calls of a turn")
    top_k: int = HfArg(default=2, help="documents that a search returns")

    def __post_init__(self):
        require(self, "mode", self.mode in get_args(Mode), f"one of {', '.join(get_args(Mode))}")
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                least = LEAST.get(name, 1 if isinstance(value, int) else 1e-9)
                require(self, name, value >= least, f"{least} or more")

    def room(self, chat, task):
        """The length that a context may have before a turn. UserError unless the task's prompt fits in."""
        ends = len(chat.generation + chat.close)
        reserve = ends + self.max_turn_tokens + self.max_response_tokens
        summary = [0] * self.max_summary_tokens if self.mode in COMPACTING else None
        if summary:  # two tries of it are kept free as well
            asked = chat.instruction(self, "compact") + chat.instruction(self, "shorter")
            reserve += len(asked) + 2 * ends + 3 * len(summary) // 2
        need = len(chat.main_prompt(self, task.question, summary)) + reserve
        require(self, "max_context", need <= self.max_context, f"{need} or more for task {task.id!r}")
        need = self.max_parallel_calls * (len(chat.response([])) + 8)
        require(self, "max_response_tokens", need <= self.max_response_tokens, f"{need} or more for calls")
        return self.max_context - reserve


@dataclass
class Setup(Limits):  # what answers which questions, with what: further flags of train.py and eval.py
    prompts: Literal["offline", "research"] = HfArg(default="offline", help="wording of the instructions")
    model: str = HfArg(default="", help="folder or hub id of the policy; empty: the tiny one in .world")
    engine: Literal["hf", "vllm"] = HfArg(default="hf", help="what generates")
    engine_memory: float = HfArg(default=0.5, help="part of a GPU's memory that vllm takes")
    tasks: str = HfArg(default="", help="JSONL file of tasks; empty: the offline world")
    corpus: str = HfArg(default="", help="JSONL file or folder of documents to search; empty: the web")
    search_url: str = HfArg(default="", help="address of a /retrieve server to search instead of the web")
    reward: str = HfArg(default="", help="entry of REWARDS; empty: judge with API_BASE, else exact_match")
    judge_model: str = HfArg(default="deepseek-v4-flash", help="model that judges, at API_BASE")
    seed: int = HfArg(default=0, help="seed of tasks, sampling and minibatches")
    temperature: float = HfArg(default=1.0, help="sampling temperature, at which log-probs are taken too")
    token_budget: int = HfArg(default=2048, help="padded tokens of one forward, in Phi and in the update")

    def __post_init__(self):
        super().__post_init__()
        if self.engine != "hf" and not vars(self).get("dry_run"):
            require(self, "engine", find_spec("vllm"), "pip install vllm==0.32.0")
        if self.corpus:
            require(self, "corpus", self.tasks, "--tasks too")
        if self.search_url:
            alone = self.tasks and not self.corpus and re.fullmatch(ADDRESS, self.search_url)
            require(self, "search_url", alone, "an http address, --tasks too, and no --corpus")
        require(self, "reward", self.reward in ("", *REWARDS), f"one of {', '.join(REWARDS)}")


def run_program(name, work):
    """work(), whose errors become one sentence. Exit codes: 2 for what the user can mend, 130 for Ctrl-C."""
    try:
        work()
    except (UserError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def parse_flags(config_class, argv, text):
    """argv, or None for the program's own -> {field: value} of the flags that were given."""
    parser = HfArgumentParser(config_class, usage="%(prog)s FLAGS", description=text)
    parser.set_defaults(**dict.fromkeys(vars(parser.parse_args(argv))))
    return {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}


def values_of(preset, mode):
    """{field: value} in the place of a config's defaults: of a preset, or for a mode's tiny policy."""
    own = WORLD / ("compaction" if mode == "single" else mode) / "limits.json"
    return json.loads(own.read_text()) if preset == "toy" else PRESETS[preset]


def policy_of(config):
    """The folder of the policy: --model, or the tiny one of this mode. UserError: made for other limits."""
    if config.model:
        return config.model
    require(config, "model", not config.tasks, "a model that can read --tasks")
    for name, value in values_of("toy", config.mode).items():
        made = f"{value}, for which the tiny policy was made, or --model with one by .world/make.py"
        require(config, name, getattr(config, name) == value, made)
    return str(WORLD / ("compaction" if config.mode == "single" else config.mode))


# ---- Tasks and documents -----------------------------------------------------------------------------------
def read_jsonl(path):
    """("file:line", object) of each line. UserError names the line that is wrong."""
    rows = []
    where = path
    try:
        for n, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), 1):
            if line.strip():
                where = f"{path}:{n}"
                rows.append((where, dict(json.loads(line))))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{where}: expected a JSON object a line, in UTF-8 ({error})") from None
    expect(rows, f"{path}: expected at least one line, found none")
    return rows


def append_jsonl(path, rows):
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def load_texts(path, names):
    """{id: (texts, row)} of a file whose rows all have the texts `names`; an id that lacks is "file:line"."""
    found = {}
    for where, row in read_jsonl(path):
        row.setdefault("question", row.get("problem"))  # as BrowseComp and REDSearcher call it
        texts = [row.get(name) for name in names]
        good = all(isinstance(text, str) and text.strip() for text in texts)
        expect(good, f"{where}: expected texts {', '.join(names)}; found {texts!r:.100}")
        id = str(row.get("id", Path(where).name))
        expect(id not in found, f"{where}: expected a unique id, found {id!r} again")
        found[id] = ([text.strip() for text in texts], row)
    return found


def load_tasks(path):
    """Tasks of a file with `question` (or `problem`), `answer`, and perhaps a unique `id`, and `docs`."""
    found = load_texts(path, ["question", "answer"]).items()
    return [Task(*texts, row.get("docs"), id, row) for id, (texts, row) in found]


def load_corpus(path):
    """id -> text, of a JSONL file (`id`, `text`, perhaps `title`) or of a folder's .txt and .md files."""
    if Path(path).is_dir():
        files = sorted([*Path(path).rglob("*.txt"), *Path(path).rglob("*.md")])
        docs = {str(file.relative_to(path)): file.read_text("utf-8", "replace").strip() for file in files}
    else:
        rows = load_texts(path, ["id", "text"]).items()
        docs = {id: f"{row.get('title') or ''}\n{row['text']}".strip() for id, (_, row) in rows}
    expect(any(docs.values()), f"{path}: expected a folder with .txt or .md files that hold text, found none")
    return docs


# ---- Search and pages: in memory, or services --------------------------------------------------------------
# Scripts without spaces between words: there, characters and pairs of them are the words.
UNSPACED = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]+")
NO_RESULT = "No result."
SEARCH = "https://google.serper.dev/search"
READER = "https://r.jina.ai/"
BUSY = [408, 409, 425, 429, *range(500, 600)]  # statuses after which the same request may succeed
ADDRESS = r"https?://[^\s@/]+(/\S*)?"
TIMEOUT = (10, 120)  # seconds to connect, and between two packets
MAX_BYTES = 2**22
# Pages that hold a benchmark's answers, and addresses that climb out of the reader's own.
BLOCKED = r"browse[-_]?comp|/\.\.|\b(huggingface|hf|hf-mirror|modelscope|paperswithcode)\.(com?|cn)\b"
# Nine tries of what may succeed later, in some five minutes or as long as Retry-After asks for.
TRIES = Retry(8, backoff_factor=1.5, retry_after_max=300, status_forcelist=BUSY, allowed_methods=None)
SESSION = requests.Session()
for prefix in ("http://", "https://"):
    SESSION.mount(prefix, HTTPAdapter(max_retries=TRIES.new(raise_on_status=False), pool_maxsize=256))


def words_of(text):
    text = unicodedata.normalize("NFC", text).lower()
    words = regex.findall(r"[\w\p{M}]+", UNSPACED.sub(" ", text))
    for run in UNSPACED.findall(text):
        words += [*run] + [a + b for a, b in pairwise(run)]
    return words


class Corpus:  # `search` (BM25, k1 = 1.2, b = 0.75) and `visit` of documents in memory, id -> text
    def __init__(self, docs, top_k):
        self.docs, self.ids, self.top_k = docs, sorted(docs), top_k
        counts = [Counter(words_of(docs[id])) for id in self.ids]
        lengths = torch.tensor([words.total() for words in counts], dtype=torch.float64)
        self.lengths = lengths / lengths.mean()
        postings = {}  # word -> (index of a document, how often it stands there), for each that has it
        for k, words in enumerate(counts):
            for word, n in words.items():
                postings.setdefault(word, []).append((k, n))
        self.postings = {word: torch.tensor(pairs).T for word, pairs in postings.items()}

    async def search(self, query):  # the best documents: [id] and the line or sentence that fits best, each
        scores = torch.zeros(len(self.ids), dtype=torch.float64)
        idf = Counter()
        for word in dict.fromkeys(words_of(query)):
            if word in self.postings:
                indices, n = self.postings[word]
                idf[word] = math.log((len(self.ids) + 1) / (len(n) + 0.5))
                scores[indices] += idf[word] * n * 2.2 / (n + 1.2 * (0.25 + 0.75 * self.lengths[indices]))
        lines = []
        for k in scores.sort(descending=True, stable=True).indices[: self.top_k].tolist():
            if scores[k] > 0:
                texts = re.split(r"(?<=[.!?])\s+|\n+|(?<=\u3002)", self.docs[self.ids[k]][:100_000])
                best = max(texts, key=lambda text: sum(idf[word] for word in set(words_of(text))))
                lines.append(f"[{self.ids[k]}] {best[:400]}")
        return "\n".join(lines) or NO_RESULT

    async def visit(self, id):
        return self.docs.get(id, "Error: unknown page.")


def is_allowed(address):
    plain = re.fullmatch(ADDRESS, address) and address.isprintable()
    return plain and not re.search(BLOCKED, requests.utils.unquote(address).lower())


def ask(name, url, read, variable="", body=None, told=(), final=UserError):
    """read(what a service answers). `variable`: of the environment, with its key. Statuses in `told` are the
    policy's own fault, and it reads so; others raise `final`, or ConnectionError where a retry could help."""
    key = os.environ.get(variable, "").split(",")[0].strip()
    headers = {"X-API-KEY": key} if url == SEARCH else {"Authorization": f"Bearer {key}"}
    # critical: with a key no redirects, since it is for this address only.
    options = {"headers": headers if key else {}, "timeout": TIMEOUT, "allow_redirects": not key}
    for _ in range(3):
        try:
            with SESSION.request("POST" if body else "GET", url, json=body, stream=True, **options) as answer:
                text = answer.raw.read(MAX_BYTES, decode_content=True).decode("utf-8", "replace")
        except HTTPError:  # the answer was cut short
            continue
        except Exception as error:  # critical: its text can hold the key, so nobody gets to see it
            raise ConnectionError(f"{name}: no answer ({type(error).__name__})") from None
        if answer.status_code != 200:
            words = " ".join((text.replace(key, "***") if key else text).split())[:200]
            sentence = f"{name}: HTTP status {answer.status_code} {words}"
            if answer.status_code in told:
                return f"Error: this was refused. {sentence}"
            raise (ConnectionError if answer.status_code in BUSY else final)(sentence)
        with suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):
            return read(text)
    raise ConnectionError(f"{name}: three answers that cannot be read")


def result_lines(pairs):
    return "\n".join(f"[{name}] {' '.join(text.split())[:400]}" for name, text in pairs) or NO_RESULT


class Web:  # `search` by Serper's Google, `visit` by Jina's reader; their keys are in the environment
    def __init__(self, config):
        self.config, self.docs = config, {}  # of a Retriever: name -> text that it has shown

    async def search(self, query):
        what = ("search", SEARCH, self.read, "SERPER_KEY_ID", {"q": query[:1000]}, (400,), ConnectionError)
        return await asyncio.to_thread(ask, *what)

    def read(self, text):
        answer = json.loads(text)
        # Serper may leave `organic` out where it found nothing, but it always repeats the parameters.
        found = answer.get("organic", []) if "searchParameters" in answer else answer["organic"]
        pairs = [(row["link"], f"{row.get('title')}: {row.get('snippet') or ''}") for row in found]
        return result_lines([pair for pair in pairs if is_allowed(pair[0])][: self.config.top_k])

    async def visit(self, id):
        if not is_allowed(id):
            return "Error: address refused."
        told = set(range(400, 500)) - {401, 402, 403, *BUSY}  # the page's fault, and not the key's
        what = ("page", READER + id, str, "JINA_API_KEYS", None, told, ConnectionError)
        return await asyncio.to_thread(ask, *what)


class Retriever(Web):  # `search` by a server that speaks Search-R1's /retrieve, `visit` of what that returned
    visit = Corpus.visit

    async def search(self, query):
        body = {"queries": [query], "topk": self.config.top_k, "return_scores": True}
        what = ("--search-url", self.config.search_url, self.read, "", body, (400, 422))
        return await asyncio.to_thread(ask, *what)

    def read(self, text):  # {"document": {...}, "score": ...} each or bare, with or without id and title
        pairs = []
        for row in json.loads(text)["result"][0][: self.config.top_k]:
            document = row.get("document", row)
            title = document.get("title")
            contents = f"{document.get('contents') or document.get('text') or title or ''}".strip()
            name = f"{document.get('id') or title or contents[:60]}"
            while self.docs.setdefault(name, contents) != contents:  # another one of this name was shown
                name += "+"
            pairs.append((name, contents))
        return result_lines(pairs)


# ---- Rewards: functions (task, answer) -> float, async or plain --------------------------------------------
async def exact_match(task, answer):
    """1 if both have the same words, without case, English articles and punctuation outside of numbers."""
    wanted = answer_words(task.answer)
    return float(answer_words(answer) == wanted if wanted else answer == task.answer)


def answer_words(text):
    text = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    number, any_word = r"(?<!\w)-?\d+(?:[.,]\d+)*[\p{L}\p{M}\p{N}\p{S}%]*", r"[\p{L}\p{M}\p{N}\p{S}#%]+"
    words = regex.findall(f"{number}|{any_word}", regex.sub(r"[\p{Pd}\u2212]", "-", text))
    return [word for word in words if word not in ("a", "an", "the")]


async def judge(task, answer, model):
    """The verdict of a model at an OpenAI-compatible endpoint (API_BASE, API_KEY)."""
    texts = {"question": task.question, "reference": task.answer, "answer": answer[:1000]}
    prompt = PROMPTS["judge"]["grade"] + json.dumps(texts, ensure_ascii=False).replace("<", r"\u003c")
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    url = os.environ["API_BASE"].rstrip("/") + "/chat/completions"
    return await asyncio.to_thread(ask, "judge", url, read_verdict, "API_KEY", body)


def read_verdict(text):
    """1 or 0. ValueError: no verdict, or two that differ."""
    reply = json.loads(text)["choices"][0]["message"]["content"].rsplit("</think>", 1)[-1]
    # At the start of a line or as a key of JSON; a remark may follow, but not the other word at once.
    pattern = r"(?im)(?:^\W*|[{,]\s*[\"'])correct[\"'*_`]*\s*[:\uff1a][\s\"'*_`]*(yes|no|true|false)\b"
    words = re.findall(pattern + r"(?!\W{1,3}(?:or\W+)?(?:yes|no)\b)", reply)
    (verdict,) = {word.lower() in ("yes", "true") for word in words}
    return float(verdict)


def open_world(config):
    """(tools, reward function) by the flags and the environment; tools None: each task's own documents."""
    base = os.environ.get("API_BASE")
    name = config.reward or ("judge" if config.tasks and base else "exact_match")
    on_web = config.tasks and not config.corpus and not config.search_url
    keys = ["API_BASE"] if name == "judge" else []
    keys += ["SERPER_KEY_ID", "JINA_API_KEYS"] if on_web else []
    missing = ", ".join(key for key in keys if not os.environ.get(key))
    expect(not missing, f"{missing}: expected in the environment; --corpus or --search-url search elsewhere")
    if name == "judge":
        expect(re.fullmatch(ADDRESS, base), "API_BASE: expected an http address, without a key in it")
    reward = partial(judge, model=config.judge_model) if name == "judge" else REWARDS[name]
    tools = Web(config) if on_web else None
    if config.corpus:
        tools = Corpus(load_corpus(config.corpus), config.top_k)
    return (Retriever(config) if config.search_url else tools), reward


# ---- What the policy says: answers and calls ---------------------------------------------------------------
def arguments_of(name):
    return list(inspect.signature(TOOLS[name]).parameters)[1:]


def parse_call(text):
    """(name or "unknown", arguments) of the inside of a <tool_call>, JSON or Qwen3.5's XML; or MALFORMED."""
    xml = re.fullmatch(r"\s*<function=([\w-]+)>(.*)</function>\s*", text, re.S)
    pairs = re.findall(r"<parameter=([\w-]+)>(.*?)</parameter>", text, re.S)
    plain = re.sub(r"^\s*```(json)?\s|```\s*$", "", text)
    try:  # in JSON, newlines inside of a text pass
        call = {"name": xml[1], "arguments": dict(pairs)} if xml else json.loads(plain, strict=False)
        name, given = call["name"], call["arguments"]
        if name not in TOOLS:
            return "unknown", {}
        keys = arguments_of(name)
        if isinstance(given, str):  # the arguments' JSON as a text, or the only argument itself
            is_json = given.lstrip().startswith("{") or len(keys) > 1
            given = json.loads(given, strict=False) if is_json else {keys[0]: given}
        values = [given[key] if isinstance(given[key], str | int | float) else "" for key in keys]
        texts = [str(value).strip().encode("utf-8", "replace").decode() for value in values]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return MALFORMED
    return (name, dict(zip(keys, texts))) if all(texts) else MALFORMED


def speech_of(text, in_thought=False):
    """What a turn says outside of its thoughts; a thought that is not closed goes to the end of the turn."""
    if in_thought or "</think>" in text.split("<think>")[0]:
        text = "<think>" + text
    return re.sub(r"<think>.*?(</think>|$)", "", text, flags=re.S)


def parse_turn(text, in_thought=False):
    """(answer or "", calls) of one turn of the policy, outside of what it thought."""
    text = speech_of(text, in_thought)
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.S)
    calls = [parse_call(inside) for inside in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.S)]
    if not calls or text.count("<tool_call>") > len(calls):
        calls.append(MALFORMED)
    return (answers[-1].strip() if answers else ""), calls


# ---- Prompts and the chat template -------------------------------------------------------------------------
# A tokenizer's chat template, cut once into exact token pieces: `close` ends any turn, and the policy itself
# samples its first id; `generation` opens the policy's turn; `cue` (M6) its answer as well.
class Chat:
    def __init__(self, tokenizer, stops=None):
        self.tokenizer = tokenizer
        wanted = f"{tokenizer.name_or_path or 'the tokenizer'}: expected"
        template = tokenizer.chat_template
        expect(template, f"{wanted} a chat template, found none")
        # A date is pinned, and saved so: a run that is resumed tomorrow sees the same prompts.
        today = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
        template = today.sub(lambda call: json.dumps(time.strftime(call[2])), template)
        tokenizer.chat_template = template
        roles = ("system", "user", "assistant", "user")
        turns = [{"role": role, "content": f"@@{n}@@"} for n, role in enumerate(roles)]
        try:
            pieces = re.split(r"@@\d@@", tokenizer.apply_chat_template(turns, tokenize=False))
            asked = tokenizer.apply_chat_template(turns[:2], tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template can raise anything
            raise UserError(f"{wanted} a chat template for system, user, assistant ({error})") from None
        close = pieces[-1]
        alike = len(pieces) == 5 and close.strip() and all(piece.startswith(close) for piece in pieces[2:4])
        expect(alike, f"{wanted} a chat template whose turns are in order, and end alike")
        header = pieces[2].removeprefix(close)
        generation = asked.partition("@@1@@")[2].removeprefix(close)
        thought = generation.removeprefix(header).strip()
        opens = header and generation.startswith(header) and re.fullmatch(r"|<think>(\s*</think>)?", thought)
        expect(opens, f"{wanted} a generation prompt like the start of the template's assistant turn")
        self.head = pieces[:2]  # the text before the system prompt, and between it and the question
        self.close = self.own(close)
        self.user_open = self.own(pieces[3].removeprefix(close))
        self.generation = self.own(generation)
        self.in_thought = thought == "<think>"  # then the cue closes the thought first
        self.cue = self.generation + self.own("\n</think>\n\n<answer>" if self.in_thought else "<answer>")
        control = {}  # text -> id of the tokens that structure a turn; other added tokens are text
        for id, token in tokenizer.added_tokens_decoder.items():
            text = token.content
            marks = text in MARKS or (text.strip() and text in template) or re.fullmatch(r"<\|.*\|>", text)
            if token.special or marks:
                control[text] = id
        self.control = set(control.values())
        expect(self.close[0] in self.control, f"{wanted} turns that end with a token of their own")
        # critical: it consumes nothing, and so cuts overlapping spellings too, after their first characters.
        self.spelled = re.compile(f"(?s)(?<=(?={'|'.join(map(re.escape, control))}).)")
        self.tags = [tag for tag in TAGS if tag not in control]
        more = [stops] if isinstance(stops, int) else stops or []  # an id or ids that end the turn as well
        self.stops = list(dict.fromkeys([self.close[0], *more]))

    def own(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def foreign(self, text, max_tokens=None):
        """Ids of foreign text: spelled control tokens are cut in two; our tags that are none get a space."""
        text = (text if max_tokens is None else text[: 32 * max_tokens]).encode("utf-8", "replace").decode()
        for tag in self.tags:
            text = text.replace(tag, tag.replace("<", "< "))
        ids = [i for piece in self.spelled.split(text) for i in self.own(piece)]
        return [i for i in ids if i not in self.control][:max_tokens]  # a normaliser could have spelled one

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def summary_of(self, ids):
        """The ids of a summary (as drawn, where it has no thoughts) without control tokens; [] if empty."""
        text = self.decode(ids[:-1] if ids[-1] in self.stops else ids)
        speech = speech_of(text, self.in_thought)
        ids = ids if speech == text else self.foreign(speech)
        return [i for i in ids if i not in self.control | {*self.stops}] if speech.strip() else []

    def prompt(self, limits, role, forks, question):  # the system turn, with the tools, and a user turn
        names = [name for name in TOOLS if name != "delegate" or forks]
        tools = [f"{name}({', '.join(arguments_of(name))}): {TOOLS[name].__doc__}" for name in names]
        system = PROMPTS[limits.prompts][role].replace("{calls}", str(limits.max_parallel_calls))
        system = system.replace("{names}", ", ".join(names)).replace("{tools}", "\n".join(tools))
        return self.own(self.head[0] + system + self.head[1]) + question + self.close

    def main_prompt(self, limits, question, summary=None):
        done = [] if summary is None else self.own(PROMPTS[limits.prompts]["summary"]) + summary
        return self.prompt(limits, "main", limits.mode in FORKING, self.foreign(question) + done)

    def instruction(self, limits, name):
        return self.user_open + self.own(PROMPTS[limits.prompts][name]) + self.close

    def response(self, ids):
        framed = self.own("<tool_response>\n") + ids + self.own("\n</tool_response>")
        return self.user_open + framed + self.close


# ---- Engines -----------------------------------------------------------------------------------------------
# An engine is made of (model, config, temperature); callers set its `temperature` too. It has four methods:
#   async generate(token_ids, max_new_tokens, stop) -> (ids with stop token, log-probs, "stop" or "length"),
#   load_weights(pairs of name and tensor), which wakes it up, reseed(seed), and sleep(), which frees the GPU
def load_policy(source, max_context=0, dtype=torch.float32):
    """(model, Chat) of a folder or hub id. UserError: none there, or not to be trained."""
    logging.disable_progress_bar()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # on a busy machine, two are several times slower than one
    expect(not Path(source, "adapter_config.json").exists(), f"--model {source}: merge this adapter first")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
        longest = getattr(config, "max_position_embeddings", None) or max_context
        expect(max_context <= longest, f"--max-context {max_context}: expected at most {longest}")
        slow = torch.cuda.is_available() and config.model_type.startswith("qwen3_5") and not find_spec("fla")
        expect(not slow, f"--model {source}: expected pip install flash-linear-attention, else it crawls")
        Chat(tokenizer)  # a template that will not do is refused before the weights are loaded
        model, info = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
        expect(not info["missing_keys"], f"--model {source}: expected weights of {info['missing_keys']} too")
        expect(all(w.requires_grad for w in model.parameters()), f"--model {source}: some weights are frozen")
    except UserError:
        raise
    except Exception as error:  # libraries have many words for weights that are torn or do not fit
        raise UserError(f"--model {source}: expected a model with its tokenizer ({error!r:.200})") from None
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # in eval mode, as log-probs are compared
    return model.eval(), Chat(tokenizer, model.generation_config.eos_token_id)


class HFEngine:  # all waiting requests in one left-padded KV-cache loop; other engines are checked against it
    def __init__(self, model, config, temperature=1.0):  # 0: greedy
        self.model, self.temperature = model, temperature
        self.generator = torch.Generator(model.device)
        self.waiting, self.runner = [], None  # requests of the next batch, and the task that samples it

    def load_weights(self, named_tensors):  # those of the trainer; tied ones may be missing
        self.model.load_state_dict(dict(named_tensors), strict=False)

    def reseed(self, seed):
        self.generator.manual_seed(seed)

    def sleep(self):
        """It holds nothing that the update could need."""

    async def generate(self, token_ids, max_new_tokens, stop):
        if self.runner is None or self.runner.done():  # drawn, or cancelled with its event loop
            self.waiting = []
            self.runner = asyncio.create_task(self.sample_waiting())
        place = len(self.waiting)
        self.waiting.append((token_ids, max_new_tokens, stop))
        return (await asyncio.shield(self.runner))[place]  # one who is cancelled must not stop the others

    async def sample_waiting(self):
        # From an answer to the next request a rollout takes some five turns of the loop, in a fixed order.
        quiet = seen = 0
        while quiet < 20:  # then all that wait for no service have asked
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self.waiting) == seen else 0
            seen = len(self.waiting)
        return self.sample(self.waiting)

    @torch.no_grad()
    def sample(self, asked):  # B of (ids, max_new_tokens, stop) -> B of (ids, log-probs, finish reason)
        rows = [torch.tensor(ids, device=self.model.device) for ids, _, _ in asked]
        tokens_BT = pad_sequence(rows, batch_first=True, padding_side="left")
        mask_BT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        cache = DynamicCache(config=self.model.config)
        results = [([], [], "") for _ in asked]
        while not all(finish for _, _, finish in results):
            # A position is the number of real tokens before it, so padding changes nothing.
            positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)[:, -tokens_BT.shape[1] :]
            inputs = {"attention_mask": mask_BT, "position_ids": positions_BT, "past_key_values": cache}
            logits_BV = self.model(tokens_BT, **inputs, logits_to_keep=1).logits[:, -1].float()
            logprobs_BV = (logits_BV / (self.temperature if self.temperature else 1)).log_softmax(-1)
            tokens_BT = logprobs_BV.argmax(-1, keepdim=True)
            if self.temperature:
                tokens_BT = torch.multinomial(logprobs_BV.exp(), 1, generator=self.generator)
            drawn = zip(asked, tokens_BT[:, 0].tolist(), logprobs_BV.gather(1, tokens_BT)[:, 0].tolist())
            for k, ((_, max_new_tokens, stop), token, logprob) in enumerate(drawn):
                ids, logprobs, finish = results[k]
                if not finish:  # else its row goes on, and nobody looks
                    ids.append(token)
                    logprobs.append(logprob)
                    finish = "length" if len(ids) == max_new_tokens else ""
                    results[k] = (ids, logprobs, "stop" if token in stop else finish)
            mask_BT = torch.cat([mask_BT, torch.ones_like(mask_BT[:, :1])], dim=1)
        return results


class VLLMEngine:  # vLLM in this process, made of the model's config; its weights come by `load_weights`
    def __init__(self, model, config, temperature=1.0):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vllm is imported
        from vllm import EngineArgs, LLMEngine, SamplingParams, _custom_ops
        from vllm.sampling_params import RequestOutputKind

        _custom_ops._supports_onednn = False  # on a CPU it packs weights, which then cannot be replaced
        gpu = torch.cuda.is_available()
        self.temperature, self.seeds = temperature, random.Random(0)
        self.dtype = torch.bfloat16 if gpu else torch.float32
        # With ignore_eos nothing but `stop` ends a turn early; there is no top-p and no top-k.
        options = {"logprobs": 0, "flat_logprobs": True, "detokenize": False, "ignore_eos": True}
        self.params = partial(SamplingParams, **options, output_kind=RequestOutputKind.FINAL_ONLY)
        self.names, self.waiting = map(str, count()), {}  # name of a request -> None, or what was drawn
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": config.max_context}
        options |= {"max_num_batched_tokens": 16384, "mamba_ssm_cache_dtype": "float32"}
        options |= {"dtype": str(self.dtype).removeprefix("torch."), "async_scheduling": False}
        options["logprobs_mode"] = "processed_logprobs"  # of what was drawn from, after the temperature
        # Under torchrun each rank has a whole engine, and prompts, of its own.
        options["distributed_executor_backend"] = "external_launcher" if "RANK" in os.environ else None
        # A CPU cannot draw with a seed after a prompt in chunks.
        options["kv_cache_memory_bytes"] = None if gpu else 1 << 29
        options |= {"enforce_eager": not gpu, "enable_sleep_mode": gpu, "enable_chunked_prefill": gpu}
        if gpu:  # asleep, it leaves the graphs' memory too; gdn's default needs a CUDA toolkit at run time
            options |= {"gpu_memory_utilization": config.engine_memory, "gdn_prefill_backend": "triton"}
            options["sleep_mode_offload_cudagraph"] = True
        # A fixed folder for each rank: its path is part of the key of vLLM's compile cache.
        folder = Path(tempfile.gettempdir(), f"mosaic-engine-{os.getuid()}-{os.environ.get('RANK', 0)}")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        with torch.random.fork_rng(devices=[]):  # vllm reseeds
            self.core = LLMEngine.from_engine_args(EngineArgs(str(folder), **options))

    def reseed(self, seed):
        self.seeds.seed(seed)

    def sleep(self):
        if torch.cuda.is_available():
            self.core.sleep(level=2)

    @torch.no_grad()
    def load_weights(self, named_tensors):
        self.core.wake_up(["weights"])
        cast = ((name, tensor.to(self.dtype)) for name, tensor in named_tensors)
        self.core.model_executor.driver_worker.model_runner.get_model().load_weights(cast)
        # critical: prompts that begin alike would go on reusing the keys and values of the old weights.
        expect(self.core.reset_prefix_cache(), "vllm: expected no request in flight when weights are loaded")
        torch.cuda.empty_cache()  # the cache needs what the update has freed
        self.core.wake_up(["kv_cache"])

    async def generate(self, token_ids, max_new_tokens, stop):
        options = {"temperature": self.temperature, "seed": self.seeds.getrandbits(63)}
        params = self.params(max_tokens=max_new_tokens, stop_token_ids=stop, **options)
        name = next(self.names)
        self.core.add_request(name, {"type": "token", "prompt_token_ids": token_ids}, params)
        self.waiting[name] = None
        try:
            while self.waiting[name] is None:
                await asyncio.sleep(0)  # all rollouts go on, and their next requests join the next step
                if name == next(iter(self.waiting)):  # the first one steps the engine, for all of them
                    for output in self.core.step():
                        self.waiting[output.request_id] = output.outputs[0]
        except Exception as error:  # what the others wait for is lost with a step that failed
            raise UserError(f"vllm: {error!r}") from error
        finally:
            drawn = self.waiting.pop(name)
            if drawn is None:  # this rollout was cancelled
                self.core.abort_request([name])
        return list(drawn.token_ids), list(drawn.logprobs.logprobs), drawn.finish_reason


# ---- The agent ---------------------------------------------------------------------------------------------
class Agent:  # one trajectory in the making: the coroutines that run its sessions, and what they share
    def __init__(self, task, engine, chat, limits, tools):
        self.room = limits.room(chat, task)  # UserError: a prompt, a turn and a summary do not fit
        self.trajectory = Trajectory(task, chat.foreign(task.answer))
        self.engine, self.chat, self.limits, self.tools = engine, chat, limits, tools
        self.n_sessions = 0

    async def sample_turn(self, segment, max_new_tokens):  # appended as drawn -> (ids, finish reason)
        segment.turns.append(len(segment.token_ids))
        segment.append(self.chat.generation)
        context = list(segment.token_ids)
        ids, logprobs, finish = await self.engine.generate(context, max_new_tokens, self.chat.stops)
        segment.append(ids, logprobs)
        drawn = ids[-1] == self.chat.close[0]  # the first id of the template's end of a turn
        segment.append(self.chat.close[1:] if drawn else self.chat.close)
        return ids, finish

    async def react(self, prompt, forks, max_turns):
        """ReAct in a new segment -> (answer, turns, context, truncated or malformed; the answer)."""
        trajectory, limits, chat = self.trajectory, self.limits, self.chat
        self.n_sessions += 1
        index = len(trajectory.segments)
        segment = Segment()
        segment.append(prompt)
        trajectory.segments.append(segment)
        for _ in range(max_turns):
            if len(segment.token_ids) > self.room:
                return "context", ""
            ids, finish = await self.sample_turn(segment, limits.max_turn_tokens)
            if finish == "length":
                return "truncated", ""
            answer, calls = parse_turn(chat.decode(ids), chat.in_thought)
            if answer:
                return "answer", answer
            if MALFORMED in calls:
                trajectory.malformed += 1
                if trajectory.malformed >= MOST_MALFORMED:
                    return "malformed", ""
            # The calls of a turn run at once. What they return is appended in their order, a user turn each.
            allowed = calls[: limits.max_parallel_calls]
            results = await asyncio.gather(*[self.call(forks, *call) for call in allowed])
            share = limits.max_response_tokens // len(allowed) - len(chat.response([]))
            over = chat.own("\n" + PROMPTS[limits.prompts]["over"])[:share]
            for n, result in enumerate(results, 1):
                text, session = result if isinstance(result, tuple) else (str(result), None)
                note = over if n == len(allowed) and n < len(calls) else []
                tokenise = partial(chat.foreign, text, share - len(note))
                # A large page is tokenised in a thread, while the others go on.
                ids = await asyncio.to_thread(tokenise) if len(text) > 50_000 else tokenise()
                before = (index, len(segment.token_ids))
                segment.append(chat.response(ids + note))
                if session:  # M7: its gain is that of merging its result into the main context
                    session.before = before
                    session.after = (index, len(segment.token_ids))
                    trajectory.sessions.append(session)
        return "turns", ""

    async def call(self, forks, name, arguments):
        if not name:
            return PROMPTS[self.limits.prompts]["malformed"]
        if name not in TOOLS or (name == "delegate" and not forks):
            return "Error: unknown tool."
        return await TOOLS[name](self, **arguments)

    async def search(self, query):
        """finds pages and shows one line of each"""
        return await self.tools.search(query)

    async def visit(self, id):
        """reads the page with that id"""
        return await self.tools.visit(id)

    async def fork(self, task):  # a subagent session in a segment of its own; it cannot delegate in turn
        """hands a subtask, completely described, to an assistant who knows nothing else"""
        if self.n_sessions >= self.limits.max_sessions:
            return "Error: no sessions left."
        room = self.room - len(self.chat.prompt(self.limits, "subagent", False, []))
        prompt = self.chat.prompt(self.limits, "subagent", False, self.chat.foreign(task, room))
        index = len(self.trajectory.segments)
        why, answer = await self.react(prompt, False, self.limits.max_subagent_turns)
        session = Session("subagent", index, 0, len(self.trajectory.segments[index].token_ids))
        return (answer if why == "answer" else NO_RESULT), session

    async def compact(self, segment):  # in the context that it summarises -> its ids; []: it failed twice
        self.n_sessions += 1
        for name, share in (("compact", 1), ("shorter", 2)):
            segment.append(self.chat.instruction(self.limits, name))
            ids, finish = await self.sample_turn(segment, self.limits.max_summary_tokens // share)
            summary = self.chat.summary_of(ids)
            if finish == "stop" and summary:
                return summary
        return []

    async def run(self):  # normal sessions, joined by compact ones in the modes that have them
        trajectory, limits = self.trajectory, self.limits
        turns_left = limits.max_turns
        summarising = summary = None
        while summary != []:
            prompt = self.chat.main_prompt(limits, trajectory.task.question, summary)
            index = len(trajectory.segments)
            if summarising:
                summarising.after = (index, len(prompt))
            trajectory.stop, trajectory.answer = await self.react(prompt, limits.mode in FORKING, turns_left)
            segment = trajectory.segments[index]
            turns_left -= len(segment.turns)
            full = len(segment.token_ids)
            trajectory.sessions.append(Session("normal", index, 0, full, (index, len(prompt)), (index, full)))
            may_compact = limits.mode in COMPACTING and self.n_sessions + 2 <= limits.max_sessions
            if trajectory.stop != "context" or not may_compact:
                return
            summary = await self.compact(segment)
            summarising = Session("compact", index, full, len(segment.token_ids), (index, full))
            trajectory.sessions.append(summarising)
        trajectory.stop = "truncated"


# Tools are async functions of the agent and of texts; the docstring is what the policy reads.
TOOLS = {"search": Agent.search, "visit": Agent.visit, "delegate": Agent.fork}
REWARDS = {"exact_match": exact_match, "judge": judge}
ENGINES = {"hf": HFEngine, "vllm": VLLMEngine}


async def rollout(task, engine, tokenizer, mode="", limits=None, tools=None, judge=exact_match):
    """One attempt at a Task -> Trajectory, without a reward where tools or judge raise. UserError: no room.
    tokenizer: or its Chat. tools: `async search(query)` and `async visit(id)`; None: the task's documents."""
    limits = limits or Limits()
    limits = replace(limits, mode=mode) if mode else limits
    if not tools:
        expect(task.docs, f"task {task.id!r}: expected tools, or documents of its own to search in")
        tools = Corpus(task.docs, limits.top_k)
    chat = tokenizer if isinstance(tokenizer, Chat) else Chat(tokenizer)
    agent = Agent(task, engine, chat, limits, tools)
    trajectory = agent.trajectory
    try:
        await agent.run()
        reward = judge(task, trajectory.answer) if trajectory.answer else 0.0
        trajectory.reward = float(await reward if inspect.isawaitable(reward) else reward)
    except UserError:
        raise
    except Exception as error:  # one rollout must not take its batch with it, and is not hidden either
        trajectory.stop = "infra" if isinstance(error, ConnectionError) else "error"
        tqdm.write(str(error) if trajectory.stop == "infra" else traceback.format_exc(), sys.stderr)
    for j, session in enumerate(trajectory.sessions):
        owner = trajectory.segments[session.segment].session
        owner += [j] * (session.stop - len(owner))
    return trajectory


def roll_out(tasks, engine, chat, limits, tools=None, judge=exact_match, progress=""):
    """One rollout per task, begun in their order -> trajectories in their order; `progress` names the bar."""

    async def all_of_them():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(256))  # most of them wait
        jobs = [asyncio.create_task(rollout(task, engine, chat, "", limits, tools, judge)) for task in tasks]
        return await tqdm.gather(*jobs, desc=progress, leave=False, disable=None if progress else True)

    return asyncio.run(all_of_them())
