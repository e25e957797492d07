"""The agent in any limits: what every trajectory is, whatever the policy writes.

Protects the data that training uses (what was drawn stands in one place with its log-prob, sessions tile
their segments, contexts chain as M7 wants it) and the budgets (a context is never longer than asked for).
Policies at random play in limits at random, in all four modes; then single rules, each by a short script.
"""

import asyncio
import random
import re
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from common import (
    CALL,
    FULL,
    NAMES,
    SUMMARY,
    VISIT,
    Notes,
    added_ids,
    attempt,
    offline_chat,
    offline_tasks,
    texts_of,
    tokenizer,
)

import harness

CHAT = offline_chat()
TASK = offline_tasks(1, 0)[0]
for page in TASK.docs:
    TASK.docs[page] *= 3  # longer than any response may be
MODES = ["single", "compaction", "subagent", "both"]
N_GAMES = 200


# ---- Random policies in random limits ----------------------------------------------------------------------
@dataclass
class Turn:
    """One turn of a policy: what it read, what it drew, with a log-prob by which each is found again."""

    context: list[int]
    drawn: list[int]
    logprobs: list[float]


class Player:
    """An engine whose policy writes whatever is possible, and that notes it."""

    def __init__(self, rng: random.Random, limits: dict, greedy: bool):
        self.rng = rng
        self.limits = limits
        self.greedy = greedy
        self.turns = []
        self.busy = 0
        self.most_at_once = 0

    async def generate(self, token_ids, max_new_tokens, stop):
        self.busy += 1
        for _ in range(self.rng.randint(0, 3)):
            await asyncio.sleep(0)
        self.most_at_once = max(self.most_at_once, self.busy)
        self.busy -= 1
        write = self.fill if self.greedy else self.scribble
        ids = [*write(CHAT.decode(token_ids), max_new_tokens), stop[0]]
        ids = ids[: min(max_new_tokens, ids.index(stop[0]) + 1)]
        logprobs = [-self.rng.random() for _ in ids]
        self.turns.append(Turn(token_ids, ids, logprobs))
        return ids[:], logprobs[:], "stop" if ids[-1] == stop[0] else "length"

    def fill(self, context: str, room: int) -> list[int]:
        """Takes all the room there is, for turns and for summaries; the first summary does not fit."""
        asked = re.search(r"(Summarize|Shorter)\.<.im_end.>\n<.im_start.>assistant\n$", context)
        calls = []
        for id in list(TASK.docs)[: self.limits["max_parallel_calls"]]:
            calls += CHAT.own(CALL % ("visit", "id", id))
        if asked:
            calls = []
            room += asked[1] == "Summarize"
        return calls + [40] * (room - len(calls) - 1)

    def scribble(self, context: str, room: int) -> list[int]:
        """Calls, answers, words and ids at random."""
        name = self.rng.choice([*NAMES, "From", "<tool_call>", "<|im_start|>"])
        tool = self.rng.choice([*harness.TOOLS, "x"])
        parameter = harness.arguments_of(tool)[0] if tool in harness.TOOLS else "x"
        call = CALL % (tool, parameter, name)
        length = self.rng.choice((0, 3, room - 1, room, room + 9))
        junk = self.rng.choices(range(len(CHAT.tokenizer)), k=length)
        written = self.rng.choice([call, call, call * 2, call * 4, f"<answer>{name}</answer>", name, junk])
        return CHAT.own(written) if isinstance(written, str) else written


@dataclass
class Game:
    """A trajectory, the limits it was played in and what the policy saw and wrote."""

    trajectory: harness.Trajectory
    limits: harness.Limits
    player: Player
    main: list = field(default_factory=list)  # sessions of the main agent
    forks: list = field(default_factory=list)

    def __post_init__(self):
        for session in self.trajectory.sessions:
            (self.forks if session.kind == "subagent" else self.main).append(session)


def random_limits(rng: random.Random, mode: str) -> dict:
    limits = {"mode": mode, "prompts": "offline"}
    for name in ("max_turns", "max_sessions", "max_subagent_turns"):
        limits[name] = rng.randint(1, 9)
    limits["max_parallel_calls"] = rng.randint(1, 3)
    limits["max_response_tokens"] = rng.randint(50, 60)
    limits["max_turn_tokens"] = rng.randint(12, 30)
    limits["max_summary_tokens"] = rng.randint(2, 20)
    return limits


def least_context(limits: dict) -> int:
    """The smallest max_context that is not refused: the sentence of the refusal says it."""
    with pytest.raises(harness.UserError, match="--max-context 40: expected") as error:
        harness.Limits(max_context=40, **limits).room(CHAT, TASK)
    return int(re.search(r"expected (\d+)", str(error.value))[1])


def play(seed: int, mode: str) -> Game:
    rng = random.Random(seed)
    limits = random_limits(rng, mode)
    max_context = least_context(limits) + rng.choice((0, 0, 20, 90, 300))
    player = Player(rng, limits, greedy=rng.random() < 0.3)
    limits = harness.Limits(max_context=max_context, **limits)
    trajectory = asyncio.run(harness.rollout(TASK, player, CHAT, limits=limits))
    return Game(trajectory, limits, player)


@pytest.fixture(scope="module", params=MODES)
def games(request):
    return [play(seed, request.param) for seed in range(N_GAMES)]


def test_a_context_one_token_shorter_than_the_least_is_refused():
    for seed in range(20):
        limits = random_limits(random.Random(seed), MODES[seed % 4])
        least = least_context(limits)
        harness.Limits(max_context=least, **limits).room(CHAT, TASK)
        with pytest.raises(harness.UserError, match=f"--max-context {least - 1}: expected {least}"):
            harness.Limits(max_context=least - 1, **limits).room(CHAT, TASK)


@pytest.mark.parametrize(("mode", "spare"), [("single", 1), ("compaction", 2)])
def test_the_reserve_is_enough_and_not_too_much(mode, spare):
    """A policy that takes all the room there is, in contexts of 80 lengths. Some are filled to the last token
    but `spare`: the id that ends a turn counts in its limit and in the template's end, of a summary too."""
    rest = []
    for extra in range(80):
        limits = {"mode": mode, "prompts": "offline", "max_parallel_calls": 2, "max_response_tokens": 50}
        limits |= {"max_turn_tokens": 20, "max_summary_tokens": 10, "max_turns": 30}
        max_context = least_context(limits) + extra
        player = Player(random.Random(extra), limits, greedy=True)
        limits = harness.Limits(max_context=max_context, **limits)
        trajectory = asyncio.run(harness.rollout(TASK, player, CHAT, limits=limits))
        longest = max(len(segment.token_ids) for segment in trajectory.segments)
        rest.append(max_context - longest)
    assert min(rest) == spare


def test_no_context_is_longer_than_max_context(games):
    for game in games:
        for turn in game.player.turns:
            assert len(turn.context) + len(turn.drawn) <= game.limits.max_context
        for segment in game.trajectory.segments:
            assert len(segment.token_ids) <= game.limits.max_context


def test_what_was_drawn_stands_in_one_place_with_its_logprobs(games):
    for game in games:
        for turn in game.player.turns:
            start = len(turn.context)
            stop = start + len(turn.drawn)
            found = []
            for segment in game.trajectory.segments:  # no two log-probs are alike
                if segment.logprobs[start:stop] == turn.logprobs:
                    found.append(segment)
            assert len(found) == 1
            assert found[0].token_ids[:stop] == turn.context + turn.drawn
            assert all(found[0].sampled[start:stop])


def test_nothing_else_counts_as_drawn(games):
    for game in games:
        n_drawn = sum(len(turn.drawn) for turn in game.player.turns)
        n_sampled = sum(sum(segment.sampled) for segment in game.trajectory.segments)
        assert n_sampled == n_drawn
        for segment in game.trajectory.segments:
            for sampled, logprob in zip(segment.sampled, segment.logprobs):
                assert sampled or logprob == 0.0


def test_lists_of_a_segment_have_its_length(games):
    for game in games:
        for segment in game.trajectory.segments:
            length = len(segment.token_ids)
            assert length == len(segment.sampled) == len(segment.logprobs) == len(segment.session)


def test_turns_are_where_the_generation_prompt_stands(games):
    for game in games:
        n_turns = 0
        for segment in game.trajectory.segments:
            n_turns += len(segment.turns)
            for start in segment.turns:
                stop = start + len(CHAT.generation)
                assert segment.token_ids[start:stop] == CHAT.generation
                assert segment.sampled[stop] and not segment.sampled[stop - 1]
        assert n_turns == len(game.player.turns)


def test_every_turn_is_closed_once_as_the_template_does(games):
    for game in games:
        for turn in game.player.turns:
            stop = len(turn.context) + len(turn.drawn)
            for segment in game.trajectory.segments:
                if segment.logprobs[len(turn.context) : stop] == turn.logprobs:
                    end = stop - 1 if turn.drawn[-1] == CHAT.close[0] else stop
                    assert segment.token_ids[end : end + len(CHAT.close)] == CHAT.close
                    following = segment.token_ids[end + len(CHAT.close) :]
                    assert following[:1] in ([], CHAT.user_open[:1], CHAT.generation[:1])


def test_sessions_tile_their_segments(games):
    for game in games:
        for k, segment in enumerate(game.trajectory.segments):
            owners = []
            for j, session in enumerate(game.trajectory.sessions):
                if session.segment == k:
                    assert session.start == len(owners)
                    owners += [j] * (session.stop - session.start)
            assert segment.session == owners


def test_normal_and_compact_sessions_alternate(games):
    for game in games:
        kinds = [session.kind for session in game.main]
        assert kinds == (["normal", "compact"] * len(kinds))[: len(kinds)]
        assert kinds[-1] == "normal" or game.trajectory.stop == "truncated"


def test_the_last_session_is_the_main_agents(games):
    for game in games:
        assert game.trajectory.sessions[-1] is game.main[-1]


def test_contexts_chain_along_the_main_agent(games):  # M7
    for game in games:
        for session, following in pairwise(game.main):
            assert session.after == following.before
        for session in game.main:
            begin = session.start
            if session.kind == "normal":  # it begins after its prompt
                begin = session.before[1]
                assert not any(game.trajectory.segments[session.segment].sampled[:begin])
                assert session.after == (session.segment, session.stop)
            assert session.before == (session.segment, begin)


def test_a_summary_opens_the_next_context_as_it_was_drawn(games):
    control = added_ids(CHAT.tokenizer)
    for game in games:
        for compact, following in zip(game.main[1::2], game.main[2::2]):
            old = game.trajectory.segments[compact.segment]
            opened = old.turns[-1] + len(CHAT.generation)
            drawn = []
            for id, sampled in zip(old.token_ids[opened:], old.sampled[opened:]):
                if sampled and id not in control:
                    drawn.append(id)
            new = game.trajectory.segments[following.segment].token_ids[: following.before[1]]
            assert drawn and new[-len(drawn + CHAT.close) :] == drawn + CHAT.close


def test_forks_are_merged_in_call_order_between_contexts(games):
    for game in games:
        for fork, later in pairwise(game.forks):
            assert fork.segment < later.segment
            assert fork.after <= later.before
        for fork in game.forks:
            assert fork.before[0] == fork.after[0] != fork.segment
            assert fork.before[1] < fork.after[1]
            assert fork.start == 0 and fork.stop == len(game.trajectory.segments[fork.segment].token_ids)


def test_a_segment_for_each_normal_and_subagent_session(games):
    for game in games:
        assert len(game.trajectory.segments) == len(game.forks) + len(game.main[::2])


def test_tool_responses_to_a_turn_keep_their_budget(games):
    for game in games:
        for session in game.trajectory.sessions:
            if session.kind == "compact":
                continue
            segment = game.trajectory.segments[session.segment]
            turns = [start for start in segment.turns if session.start <= start < session.stop]
            for start, stop in pairwise([*turns, session.stop]):
                drawn = sum(segment.sampled[start:stop])
                rest = stop - start - drawn - len(CHAT.generation) - len(CHAT.close)
                assert rest <= game.limits.max_response_tokens


def test_turns_calls_sessions_and_malformed_turns_keep_their_limits(games):
    for game in games:
        trajectory = game.trajectory
        limits = game.limits
        n_turns = 0
        for session in game.main[::2]:
            segment = trajectory.segments[session.segment]
            n_turns += sum(session.start <= start < session.stop for start in segment.turns)
        assert n_turns <= limits.max_turns
        assert len(trajectory.sessions) <= limits.max_sessions
        for fork in game.forks:
            assert len(trajectory.segments[fork.segment].turns) <= limits.max_subagent_turns
        assert trajectory.stop != "malformed" or trajectory.malformed >= harness.MOST_MALFORMED


def test_ends_are_told_apart_and_all_occur(games):
    stops = {game.trajectory.stop for game in games}
    assert stops == {"answer", "turns", "context", "truncated", "malformed"}
    for game in games:
        assert bool(game.trajectory.answer) == (game.trajectory.stop == "answer")
        assert game.trajectory.reward in (0, 1)


def test_each_mode_has_its_kinds_of_session(games):
    mode = games[0].limits.mode
    expected = {"normal"}
    if mode in ("compaction", "both"):
        expected.add("compact")
    if mode in ("subagent", "both"):
        expected.add("subagent")
    kinds = set()
    for game in games:
        kinds |= {session.kind for session in game.trajectory.sessions}
    assert kinds == expected


def test_only_forks_of_one_turn_run_at_the_same_time(games):
    most = max(game.player.most_at_once for game in games)
    if games[0].limits.mode in ("subagent", "both"):
        assert 1 < most <= 3
    else:
        assert most == 1


# ---- Single rules ------------------------------------------------------------------------------------------
ANSWER = "<answer>an oak</answer><|end|>"
SEARCH = '<tool_call>{"name": "search", "arguments": {"query": "oak %d"}}</tool_call>'
OVER = harness.PROMPTS["research"]["over"]
MALFORMED = harness.PROMPTS["research"]["malformed"]


def said_after(trajectory, tok, text: str) -> str:
    """What stands in the first context after that text of the policy's."""
    return texts_of(trajectory, tok)[0].split(text)[-1]


@pytest.mark.parametrize(("n_calls", "most"), [(1, 2), (2, 2), (3, 2), (2, 1), (4, 4), (5, 4)])
def test_of_too_many_calls_the_first_ones_run_and_the_last_response_says_so(n_calls, most):
    tok = tokenizer()
    notes = Notes()
    calls = [SEARCH % k for k in range(n_calls)]
    trajectory = attempt(
        lambda _: "".join(calls) + "<|end|>", tok, tools=notes, max_turns=1, max_parallel_calls=most
    )
    assert notes.queries == [f"oak {k}" for k in range(min(n_calls, most))]
    told = said_after(trajectory, tok, calls[-1])
    responses = told.split("<tool_response>")[1:]
    assert len(responses) == min(n_calls, most)
    assert told.count(OVER) == (1 if n_calls > most else 0)
    assert (OVER in responses[-1]) == (n_calls > most)
    assert "Mira planted an oak." in responses[-1]


@pytest.mark.parametrize("most", [1, 4])
def test_the_prompt_says_how_many_calls_a_turn_may_have(most):
    tok = tokenizer()
    trajectory = attempt(lambda _: ANSWER, tok, max_parallel_calls=most)
    assert f"{most} at most" in texts_of(trajectory, tok)[0]


def test_an_unknown_tool_is_answered_and_not_malformed():
    tok = tokenizer()
    call = CALL % ("browse", "id", "b")
    trajectory = attempt(lambda _: call + "<|end|>", tok, max_turns=3)
    assert trajectory.stop == "turns"
    assert trajectory.malformed == 0
    assert said_after(trajectory, tok, call).count("Error: unknown tool.") == 1


@pytest.mark.parametrize("mode", ["single", "compaction"])
def test_to_delegate_is_an_unknown_tool_in_modes_without_subagents(mode):
    tok = tokenizer()
    call = CALL % ("delegate", "task", "Find it.")
    trajectory = attempt(lambda _: call + "<|end|>", tok, max_turns=1, mode=mode)
    assert [session.kind for session in trajectory.sessions] == ["normal"]
    assert "Error: unknown tool." in said_after(trajectory, tok, call)
    assert "delegate(" not in texts_of(trajectory, tok)[0]


def test_a_subagent_cannot_delegate_and_is_not_told_of_it():
    tok = tokenizer()
    call = CALL % ("delegate", "task", "Find it.")

    def reply(context):
        return ANSWER if "an oak" in context or "No result." in context else call + "<|end|>"

    trajectory = attempt(reply, tok, mode="subagent", max_subagent_turns=2)
    assert [session.kind for session in trajectory.sessions] == ["subagent", "normal"]
    main, fork = texts_of(trajectory, tok)
    assert "delegate(task):" in main and "delegate(task):" not in fork
    assert fork.count("Error: unknown tool.") == 2
    assert "No result." in main


def test_the_report_of_a_subagent_is_the_tools_result():
    tok = tokenizer()
    call = CALL % ("delegate", "task", "What did Mira plant?")

    def reply(context):
        if "for a colleague" in context:
            return "<answer>It was an oak.</answer><|end|>"
        return ANSWER if "It was" in context else call + "<|end|>"

    trajectory = attempt(reply, tok, mode="subagent")
    assert trajectory.reward == 1
    assert "<tool_response>\nIt was an oak.\n</tool_response>" in texts_of(trajectory, tok)[0]


def test_malformed_turns_are_told_counted_and_end_the_trajectory():
    tok = tokenizer()
    trajectory = attempt(lambda _: "Let me see.<|end|>", tok, max_turns=9)
    assert (trajectory.stop, trajectory.malformed, trajectory.reward) == ("malformed", 4, 0)
    assert texts_of(trajectory, tok)[0].count(MALFORMED) == 3


def test_a_turn_without_its_end_is_truncated_and_never_read():
    trajectory = attempt(lambda _: "<answer>an oak</answer>" + " and" * 500 + "<|end|>")
    assert (trajectory.stop, trajectory.answer, trajectory.reward) == ("truncated", "", 0)


def test_the_limit_of_turns_holds_over_all_sessions():
    def reply(context):
        return "Mira planted an oak.<|end|>" if FULL in context[-900:] else VISIT + "<|end|>"

    trajectory = attempt(reply, mode="compaction", max_turns=7)
    normal = [session for session in trajectory.sessions if session.kind == "normal"]
    n_turns = sum(
        sum(session.start <= start < session.stop for start in trajectory.segments[session.segment].turns)
        for session in normal
    )
    assert trajectory.stop == "turns" and len(normal) > 1
    assert n_turns == 7


# ---- Summaries ---------------------------------------------------------------------------------------------
def compacting(summaries: list[str], prefix=""):
    """A policy that visits until its context is full, then writes these summaries, the last one for ever."""
    left = list(summaries)

    def reply(context):
        if FULL in context and SUMMARY not in context:
            return left.pop(0) if len(left) > 1 else left[0]
        return prefix + (ANSWER if SUMMARY in context else VISIT + "<|end|>")

    return reply


NOTHING = ["<|end|>", " \n<|end|>", "<think>I know it all.</think>\n<|end|>", "<think>open<|end|>"]


def test_a_summary_is_carried_on():
    tok = tokenizer()
    trajectory = attempt(compacting(["Mira planted an oak.<|end|>"]), tok, mode="compaction")
    assert trajectory.reward == 1
    assert f"{SUMMARY}\nMira planted an oak.<|end|>" in texts_of(trajectory, tok)[1]


@pytest.mark.parametrize("nothing", [*NOTHING, "and so on " * 60 + "<|end|>"])
def test_a_summary_that_is_empty_or_too_long_is_asked_for_once_more(nothing):
    tok = tokenizer()
    reply = compacting([nothing, "Mira planted an oak.<|end|>"])
    trajectory = attempt(reply, tok, mode="compaction")
    first, second = texts_of(trajectory, tok)
    assert harness.PROMPTS["research"]["shorter"] in first
    assert f"{SUMMARY}\nMira planted an oak.<|end|>" in second
    assert trajectory.reward == 1


@pytest.mark.parametrize("nothing", [*NOTHING, "and so on " * 60 + "<|end|>"])
def test_after_two_summaries_that_are_none_the_trajectory_ends(nothing):
    trajectory = attempt(compacting([nothing]), mode="compaction")
    assert (trajectory.stop, trajectory.reward) == ("truncated", 0)
    assert [session.kind for session in trajectory.sessions] == ["normal", "compact"]
    assert len(trajectory.segments) == 1


# ---- What goes wrong outside -------------------------------------------------------------------------------
class Failing:
    """Tools that raise."""

    def __init__(self, error: Exception):
        self.error = error

    async def search(self, query):
        raise self.error


def outcome(tools=None, judge=harness.exact_match, said=SEARCH % 1 + "<|end|>"):
    tok = tokenizer()

    async def generate(token_ids, max_new_tokens, stop):
        ids = tok.encode(said, add_special_tokens=False)
        return ids, [-0.1] * len(ids), "stop"

    engine = type("Engine", (), {"generate": staticmethod(generate)})
    task = harness.Task("What did Mira plant?", "an oak", {"b": "Mira planted an oak."}, "t")
    limits = harness.Limits(max_context=1500, max_turn_tokens=200, max_response_tokens=300, max_turns=2)
    return asyncio.run(harness.rollout(task, engine, tok, "single", limits, tools, judge))


def test_search_that_is_down_gives_no_reward(capsys):
    trajectory = outcome(Failing(ConnectionError("search: no answer")))
    assert (trajectory.stop, trajectory.reward) == ("infra", None)
    assert "search: no answer" in capsys.readouterr().err


def test_a_bug_of_a_tool_gives_no_reward_and_is_shown(capsys):
    trajectory = outcome(Failing(KeyError("a bug of the tool")))
    assert (trajectory.stop, trajectory.reward) == ("error", None)
    assert "Traceback" in capsys.readouterr().err


def test_a_judge_that_is_down_gives_no_reward(capsys):
    async def down(task, answer):
        raise ConnectionError("judge: no answer")

    trajectory = outcome(judge=down, said=ANSWER)
    assert (trajectory.stop, trajectory.answer, trajectory.reward) == ("infra", "an oak", None)


def test_what_the_user_must_mend_ends_the_program():
    with pytest.raises(harness.UserError, match="--search-url"):
        outcome(Failing(harness.UserError("--search-url x: expected a /retrieve server")))


def test_a_rollout_without_anything_to_search_is_refused():
    task = harness.Task("Who?", "Ada")
    with pytest.raises(harness.UserError, match="expected tools, or documents"):
        asyncio.run(harness.rollout(task, None, CHAT))


def test_a_reward_may_be_a_plain_function_and_graded():
    trajectory = outcome(judge=lambda task, answer: 0.25, said=ANSWER)
    assert trajectory.reward == 0.25
