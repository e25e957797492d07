"""How long an engine waits for the harness: PYTHONPATH=. python .ci/idle.py

16 rollouts search 50,000 documents of 100 words and read pages of 500,000 characters. The engine draws a
token for all that wait in 20 ms, and knows how long it was kept from its next step. Each
row is the harness with one part more made slow again: pages tokenised on the event loop, a search that scans.
"""

import argparse
import asyncio
import math
import random
import time
from collections import Counter

import torch

import harness

STEP = 0.02  # seconds of a step of the engine


class Engine:
    def __init__(self, chat, seed=0):
        self.chat, self.rng, self.waiting = chat, random.Random(seed), {}
        self.busy = self.idle = 0.0
        self.free_at = None

    async def generate(self, token_ids, max_new_tokens, stop):
        said = f'{{"name": "search", "arguments": {{"query": "w{self.rng.randrange(5000)} w7 w8 w9"}}}}'
        if self.rng.random() < 0.25:
            said = '{"name": "visit", "arguments": {"id": "large"}}'
        ids = [*self.chat.own(f"<tool_call>{said}</tool_call>"), self.chat.close[0]]
        name, left = object(), len(ids)
        self.waiting[name] = True
        while left:
            await asyncio.sleep(0)
            if name is next(iter(self.waiting)):
                now = time.perf_counter()
                if self.free_at is not None:
                    self.idle += now - self.free_at
                time.sleep(STEP)
                self.busy += STEP
                self.free_at = time.perf_counter()
            left -= 1
        del self.waiting[name]
        if not self.waiting:
            self.free_at = None  # nobody waits: that is not the harness's fault
        return ids, [0.0] * len(ids), "stop"


class Scanning(harness.Corpus):
    """The search as it was: every document is looked at for every query."""

    def __init__(self, docs, top_k):
        self.docs, self.top_k = docs, top_k
        self.counts = {id: Counter(harness.words_of(text)) for id, text in docs.items()}
        self.mean = sum(words.total() for words in self.counts.values()) / len(docs)

    async def search(self, query):
        words = set(harness.words_of(query))
        n_of = {word: sum(word in counts for counts in self.counts.values()) for word in words}
        scores = {}
        for id, counts in self.counts.items():
            length = 0.25 + 0.75 * counts.total() / self.mean
            scores[id] = 0.0
            for word in words & counts.keys():
                idf = math.log((len(self.docs) + 1) / (n_of[word] + 0.5))
                scores[id] += idf * counts[word] * 2.2 / (counts[word] + 1.2 * length)
        best = sorted(scores, key=lambda id: (-scores[id], id))[: self.top_k]
        return "\n".join(f"[{id}] {self.docs[id][:400]}" for id in best)


async def at_once(function, *args):
    return function(*args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=50_000)
    n = parser.parse_args().documents
    torch.set_num_threads(1)
    rng = random.Random(0)
    docs = {str(k): " ".join(f"w{rng.randrange(5000)}" for _ in range(100)) for k in range(n)}
    docs["large"] = " ".join(f"w{rng.randrange(5000)}" for _ in range(95_000))
    _, chat = harness.load_policy(str(harness.WORLD / "compaction"))
    limits = harness.Limits(
        mode="single", max_context=200_000, max_turn_tokens=64, max_response_tokens=16_384
    )
    limits.max_turns = 8
    tasks = [harness.Task("From Ada follow taught.", "Mira", None, str(k)) for k in range(16)]
    in_thread = asyncio.to_thread
    for name, corpus, to_thread in (
        ("postings, pages in threads", harness.Corpus, in_thread),
        ("postings, pages on the loop", harness.Corpus, at_once),
        ("scanning, pages on the loop", Scanning, at_once),
    ):
        tools = corpus(docs, 3)
        engine = Engine(chat)
        asyncio.to_thread = to_thread
        start = time.perf_counter()
        harness.roll_out(tasks, engine, chat, limits, tools)
        wall = time.perf_counter() - start
        asyncio.to_thread = in_thread
        share = engine.idle / (engine.idle + engine.busy)
        times = f"idle {engine.idle:.1f} s, busy {engine.busy:.1f} s, {wall:.1f} s in all"
        print(f"{name:<28} idle share {share:.2f} ({times})")


if __name__ == "__main__":
    main()
