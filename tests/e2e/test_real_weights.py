"""SmolLM2-135M-Instruct end to end: our runner writes, token for token, what transformers' eager attention writes.

fp32 on both sides and greedy. The weights are 4-bit, dequantised: equality is judged here, not quality. One load and
one transformers run serve the whole session.
"""

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from heedful import runner
from heedful.errors import WeightsError
from heedful.runner import Checkpoint, Engine, ModelRunner, RunnerOptions, SamplingParams, generate, streaming, weights
from heedful.runner.streaming import encode_prompt

pytestmark = pytest.mark.weights

NEW_TOKENS = 64
BLOCK = 16
SYSTEM = "You are a patient teacher. You answer in plain words, you give one example, and you never invent a fact. "
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle on a cold morning in November.",
    "List ten animals that live in the sea.",
    "What is a prime number?",
    "Give me a recipe for bread that needs no oven, and say how long each step takes and what can go wrong in it.",
    "Who was Marie Curie?",
    "Explain how rain forms.",
    "Tell me about the history of the bicycle, from the first wooden machines to the ones that we ride today, please.",
)


@dataclass(frozen=True)
class Witness:
    """What load_smollm2 gave, and the transformers model that it was read from, on eager attention."""

    checkpoint: Checkpoint
    model: Any
    tokenizer: Any

    def continue_(self, prompts, **options):
        """transformers' greedy tokens and scores of a left-padded batch."""
        longest = max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[2] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        assert self.model.config._attn_implementation == "eager"
        asked = {"do_sample": False, "pad_token_id": 2, "return_dict_in_generate": True, "output_logits": True}
        with torch.inference_mode():
            made = self.model.generate(ids, attention_mask=mask, **asked, **options)
        return made.sequences[:, longest:], torch.stack(made.logits, 1)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def witness():
    try:
        weights.smollm2_path()
    except WeightsError as missing:
        pytest.skip(str(missing))
    kept = {}
    with pytest.MonkeyPatch.context() as patch:
        read = weights.from_transformers
        patch.setattr(weights, "from_transformers", lambda model, *rest: read(kept.setdefault("model", model), *rest))
        checkpoint = weights.load_smollm2()
    kept["model"].set_attn_implementation("eager")
    return Witness(checkpoint, kept["model"], checkpoint.tokenizer)


@pytest.fixture(scope="session")
def prompts(witness):
    turns = [[{"role": "system", "content": SYSTEM * 2}, {"role": "user", "content": asked}] for asked in QUESTIONS]
    texts = [witness.tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True) for t in turns]
    return [witness.tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="session")
def expected(witness, prompts):
    end = witness.model.generation_config.eos_token_id
    witness.model.generation_config.eos_token_id = None  # every prompt goes on for all of its tokens
    tokens, logits = witness.continue_(prompts, max_new_tokens=NEW_TOKENS)
    witness.model.generation_config.eos_token_id = end
    best = logits.topk(2).values
    gap = float((best[..., 0] - best[..., 1]).min())
    assert gap > 1e-3, f"two tokens lie {gap} apart: rounding could decide between them, so equality proves nothing"
    assert tokens.shape == (8, NEW_TOKENS)
    return tokens.tolist()


def serve(witness, prompts, options, backend="TORCH_SDPA"):
    """The engine after it served all prompts, and their requests."""
    engine = Engine(ModelRunner(witness.checkpoint, options))
    assert engine.runner.selection.backend == backend
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    assert engine.pool.num_free == engine.pool.num_blocks
    return engine, requests


def test_a_batch_of_eight_gives_the_tokens_of_transformers_eager(witness, prompts, expected):
    whole = RunnerOptions(max_num_batched_tokens=2048, share_prefixes=False, block_size=BLOCK)
    engine, requests = serve(witness, prompts, whole)
    assert [request.new_tokens for request in requests] == expected
    assert engine.stats.partial_chunks == 0
    assert engine.stats.largest_step == sum(map(len, prompts))


def test_chunked_prefill_gives_the_same_tokens(witness, prompts, expected):
    chunked = RunnerOptions(max_num_batched_tokens=48, share_prefixes=False, block_size=BLOCK)
    engine, requests = serve(witness, prompts, chunked)
    assert [request.new_tokens for request in requests] == expected
    assert engine.stats.partial_chunks >= len(prompts)
    assert engine.stats.mixed_steps > 0
    assert engine.stats.largest_step == 48


@pytest.mark.parametrize(("block_size", "variant"), [(32, "paged"), (16, "sdpa")])
def test_openvino_gives_the_same_tokens(witness, prompts, expected, monkeypatch, block_size, variant):
    pytest.importorskip("openvino", reason="openvino is not installed: pip install 'heedful[openvino]'")
    monkeypatch.setenv("HEEDFUL_PLATFORM", "openvino")
    options = RunnerOptions(max_num_batched_tokens=256, block_size=block_size)
    engine, requests = serve(witness, prompts, options, "OPENVINO")
    assert engine.runner.selection.chosen.variant == variant
    assert str(engine.runner.selection.device) == "openvino CPU"
    assert [request.new_tokens for request in requests] == expected
    assert engine.stats.mixed_steps > 0


@pytest.mark.filterwarnings("ignore:HEEDFUL_PLATFORM=tpu")
def test_pallas_gives_the_same_tokens(witness, prompts, expected, monkeypatch):
    """Emulated where there is no TPU: two prompts, because the interpreter is slow."""
    import_module("heedful.kernels.pallas")  # before jax: it settles what jax reads from the environment
    pytest.importorskip("jax", reason="jax is not installed: pip install 'heedful[tpu]'")
    monkeypatch.setenv("HEEDFUL_PLATFORM", "tpu")
    options = RunnerOptions(max_num_batched_tokens=128, block_size=BLOCK, emulated=True)
    engine, requests = serve(witness, prompts[:2], options, "PALLAS")
    assert [request.new_tokens for request in requests] == expected[:2]
    assert engine.stats.mixed_steps > 0


def test_a_shared_prefix_gives_the_same_tokens_from_shared_blocks(witness, prompts, expected):
    common = next(i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    blocks = common // BLOCK
    assert blocks >= 2
    engine = Engine(ModelRunner(witness.checkpoint, RunnerOptions(block_size=BLOCK)))
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    first = engine.add(prompts[0], params)
    engine.step()
    others = [engine.add(prompt, params) for prompt in prompts[1:]]
    engine.step()
    assert [engine.pool.holders(block) for block in first.blocks[:blocks]] == [8] * blocks
    assert all(request.blocks[:blocks] == first.blocks[:blocks] for request in others)
    engine.run()
    assert [request.new_tokens for request in (first, *others)] == expected
    assert [request.shared for request in (first, *others)] == [0, *[blocks * BLOCK] * 7]


def test_generate_streams_the_text_of_transformers_up_to_its_end(witness):
    question = "What is the capital of France? Answer with an accent or an emoji."
    prompt = encode_prompt(witness.tokenizer, question)
    tokens, _ = witness.continue_([prompt], max_new_tokens=48)
    text = witness.tokenizer.decode(tokens[0], skip_special_tokens=True)
    made = generate(question, SamplingParams(max_tokens=48), checkpoint=witness.checkpoint)
    pieces = list(made)
    assert made.request.new_tokens == tokens[0].tolist()
    assert "".join(pieces) == made.text == text
    assert len(pieces) > 3
    assert made.backend == "TORCH_SDPA"


def test_the_snippets_of_the_page_run_as_they_stand(witness, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "runner.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(snippets) == 2
    monkeypatch.setattr(streaming, "load_smollm2", lambda *dtype: witness.checkpoint)
    monkeypatch.setattr(runner, "load_smollm2", lambda *dtype: witness.checkpoint)
    for snippet in snippets:
        exec(compile(snippet, "docs/runner.md", "exec"), {})
    told = capsys.readouterr().out
    assert "TORCH_SDPA on cpu, chosen by preference" in told
    assert "The capital of France is Paris.TORCH_SDPA stop" in told
    assert "A bicycle has" in told
