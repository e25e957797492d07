"""vLLM draws from the trainer's policy: a script for a venv with vllm, run by .ci/run and not by pytest.

Protected: with tied embeddings and without, the engine's log-probs are the trainer's, at other temperatures,
after new weights (no stale weights, no stale prefix cache), in rollouts, and after a step that failed or a
request that was cancelled; and its draws are functions of the seed.
"""

import asyncio
import tempfile
from pathlib import Path

import torch
import transformers
from child import offline_tasks, shipped_policy

import harness
import phi
import train

FLAGS = "--engine vllm --parity-tolerance 9"
PROMPTS = [[5 + k] * 150 for k in range(16)]  # longer than a block of the prefix cache


def model_like(shipped, tied: bool):
    """A random model of the shipped one's form, with a head of its own or with that of the embeddings."""
    values = {name: value for name, value in shipped.config.to_dict().items() if name != "architectures"}
    values["tie_word_embeddings"] = tied
    torch.manual_seed(0)
    config = type(shipped.config)(**values)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


async def draw(engine, chat, ids):
    segment = harness.Segment()
    segment.append(ids)
    drawn, logprobs, _ = await engine.generate(ids, 20, chat.close[:1])
    segment.append(drawn, logprobs)
    return segment


async def draw_all(engine, chat, prompts, return_exceptions=True):
    draws = [draw(engine, chat, ids) for ids in prompts]
    return await asyncio.wait_for(asyncio.gather(*draws, return_exceptions=return_exceptions), 60)


def gap_of(model, segments, config) -> float:
    """The largest difference between engine and trainer in a token, in nats."""
    ids = [segment.token_ids for segment in segments]
    wanted = [segment.sampled[1:] for segment in segments]
    with torch.no_grad():
        exact = torch.cat(phi.token_logprobs(model, ids, wanted, temperature=config.temperature))
    drawn = []
    for segment in segments:
        drawn.append(torch.tensor(segment.logprobs)[torch.tensor(segment.sampled)])
    return (exact - torch.cat(drawn)).abs().max().item()


def check(name: str, gap: float) -> None:
    print(f"  {name}: {gap:.2g} nats a token", flush=True)
    assert gap < 1e-4, name


def perturb(model, chat) -> None:
    """New weights, whose turns are short, so that contexts fill."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        model.get_output_embeddings().weight[chat.close[0]] *= 4


def parity(model, chat, config) -> None:
    engine = harness.ENGINES["vllm"](model, config)

    def gap():
        return gap_of(model, asyncio.run(draw_all(engine, chat, PROMPTS)), config)

    engine.load_weights(model.named_parameters())
    for config.temperature in (0.7, 1.0):
        engine.temperature = config.temperature
        check(f"at temperature {config.temperature}", gap())

    perturb(model, chat)
    stale = gap()
    print(f"  stale weights would be seen: {stale:.2g}")
    assert stale > 0.02
    reset = engine.core.reset_prefix_cache
    engine.core.reset_prefix_cache = lambda: True
    engine.load_weights(model.named_parameters())
    stale = gap()
    print(f"  a stale prefix cache would be seen: {stale:.2g}")
    assert stale > 0.002
    engine.core.reset_prefix_cache = reset
    engine.load_weights(model.named_parameters())
    check("after new weights", gap())

    trajectories = harness.roll_out(offline_tasks(16), engine, chat, config)
    segments = []
    for trajectory in trajectories:
        assert trajectory.stop not in ("error", "infra")
        segments += trajectory.segments
    check(f"in {len(segments)} segments of rollouts", gap_of(model, segments, config))

    async def cancelled():
        await asyncio.wait_for(engine.generate(PROMPTS[0], 60, []), 0.01)

    try:
        asyncio.run(cancelled())
        raise SystemExit("the request was not cancelled")
    except TimeoutError:
        pass
    assert not engine.core.has_unfinished_requests()
    check("after a request that was cancelled", gap())


def a_step_that_failed_ends_the_run(model, chat, config) -> None:
    engine = harness.ENGINES["vllm"](model, config)
    engine.load_weights(model.named_parameters())
    try:
        asyncio.run(draw_all(engine, chat, [*PROMPTS, [10**6] * 9], return_exceptions=False))  # no such token
        raise SystemExit("a step that failed was passed over")
    except harness.UserError as error:
        assert "vllm: " in str(error)


def draws_are_functions_of_the_seed(model, chat, config) -> None:
    engine = harness.ENGINES["vllm"](model, config)
    engine.load_weights(model.named_parameters())
    drawn = []
    for seed in (1, 1, 2):
        engine.reseed(seed)
        segments = asyncio.run(draw_all(engine, chat, PROMPTS))
        drawn.append([segment.token_ids for segment in segments])
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def main() -> None:
    config = train.make_config([*FLAGS.split(), "--out", str(Path(tempfile.gettempdir(), "nowhere"))])
    shipped, chat = shipped_policy()
    for tied in (False, True):
        print(f"vLLM, {'tied' if tied else 'untied'} embeddings", flush=True)
        parity(model_like(shipped, tied), chat, config)
    print("vLLM, the shipped policy twice with one seed", flush=True)
    draws_are_functions_of_the_seed(shipped, chat, config)
    print("vLLM, a step that fails", flush=True)
    a_step_that_failed_ends_the_run(shipped, chat, config)


if __name__ == "__main__":
    main()
