"""ModelRunner: what it asks in which order, which cache it makes, and that its numbers are the dense model's."""

from dataclasses import replace

import pytest
import torch

from heedful.backends.base import CommonAttentionState
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.errors import BackendUnavailableError, BadInputError, HeedfulError, SelectionError, WeightsError
from heedful.runner import ModelRunner, RunnerOptions, model_runner
from heedful.runner.batch import build_batch
from heedful.runner.scheduler import Chunk, Request
from heedful.selector import forced_backend
from heedful.types import Device, SelectionRequest
from runner.tiny import CONFIG, checkpoint, dense_logits, prompts

SMALL = RunnerOptions(num_blocks=8)


def one_prefill(runner, tokens, blocks):
    request = Request(list(tokens), max_tokens=1)
    request.blocks = blocks
    chunk = Chunk(request, 0, len(tokens), decode=False)
    return build_batch([chunk], runner.backend, runner.options.block_size, runner.device)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, tied_embeddings=False),
        replace(CONFIG, sliding_window=5),
        replace(CONFIG, num_kv_heads=1, head_size=32, rms_norm_eps=0.1),
    ],
    ids=["plain", "untied", "window", "one-kv-head"],
)
def test_logits_are_those_of_a_dense_model_in_float64(config):
    made = checkpoint(config)
    runner = ModelRunner(made, SMALL)
    (tokens,) = prompts(1, length=21)
    got = runner.execute(one_prefill(runner, tokens, [5, 2]))
    torch.testing.assert_close(got[0].double(), dense_logits(made, tokens)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_an_option_and_stays_near(dtype):
    made = checkpoint()
    runner = ModelRunner(made, replace(SMALL, dtype=dtype))
    (tokens,) = prompts(1, length=21)
    got = runner.execute(one_prefill(runner, tokens, [5, 2]))
    assert got.dtype == runner.kv_caches[0][0].dtype == getattr(torch, dtype)
    exact = dense_logits(made, tokens)[-1]
    assert (got[0].double() - exact).abs().max() < 0.06 * exact.abs().max()


@pytest.mark.parametrize(("word", "kind"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_an_fp8_cache_is_made_and_read(word, kind):
    made = checkpoint()
    runner = ModelRunner(made, replace(SMALL, kv_cache_dtype=word))
    (tokens,) = prompts(1, length=21)
    got = runner.execute(one_prefill(runner, tokens, [5, 2]))
    assert runner.kv_caches[0][0].dtype == kind
    exact = dense_logits(made, tokens)[-1]
    assert (got[0].double() - exact).abs().max() < 0.5 * exact.abs().max()


def test_the_parts_are_made_in_the_order_of_the_engine_that_the_interface_comes_from(monkeypatch):
    """Selection, state, one selection a layer, a profiling run with empty caches, a selection for the cache, steps."""
    seen = []
    ask, run = model_runner.get_attn_backend, ModelRunner.execute

    class State(CommonAttentionState):
        def __init__(self, runner):
            seen.append("state")
            super().__init__(runner)

        def begin_forward(self, model_input):
            seen.append("begin_forward")

    def asked(*arguments):
        seen.append("select")
        backend = ask(*arguments)
        monkeypatch.setattr(backend, "get_state_cls", classmethod(lambda cls: State))
        return backend

    def executed(self, model_input):
        seen.append("empty" if all(cache.numel() == 0 for cache in self.kv_caches) else "cached")
        return run(self, model_input)

    monkeypatch.setattr(model_runner, "get_attn_backend", asked)
    monkeypatch.setattr(ModelRunner, "execute", executed)
    runner = ModelRunner(checkpoint(), SMALL)
    runner.execute(one_prefill(runner, [1, 2], [0]))
    layers = CONFIG.num_layers
    profile = ["empty", "begin_forward"]
    made = ["select", "state", *["select"] * layers, *profile, *["select"] * layers, "cached", "begin_forward"]
    assert seen == made


def test_the_seven_arguments_are_what_the_model_and_the_options_say(monkeypatch):
    asked = []
    ask = model_runner.get_attn_backend
    monkeypatch.setattr(model_runner, "get_attn_backend", lambda *a: asked.append(a) or ask(*a))
    ModelRunner(checkpoint(replace(CONFIG, sliding_window=9)), replace(SMALL, block_size=32, dtype="bfloat16"))
    assert set(asked) == {(16, 9, "bfloat16", "auto", 32, False, False)}


def test_the_cache_starts_as_zeros_in_the_backends_shape():
    runner = ModelRunner(checkpoint(), SMALL)
    shape = runner.backend.get_kv_cache_shape(8, 16, CONFIG.num_kv_heads, CONFIG.head_size)
    assert len(runner.kv_caches) == CONFIG.num_layers
    assert all(tuple(cache.shape) == shape and not cache.any() for cache in runner.kv_caches)


def test_the_number_of_blocks_follows_from_the_bytes_given_to_the_cache():
    block = 2 * 16 * CONFIG.num_kv_heads * CONFIG.head_size * 4 * CONFIG.num_layers
    assert ModelRunner(checkpoint(), RunnerOptions(kv_cache_bytes=5 * block + 1)).num_blocks == 5
    with pytest.raises(BadInputError, match=f"less than one block of {block} bytes"):
        ModelRunner(checkpoint(), RunnerOptions(kv_cache_bytes=block - 1))


def test_a_cache_without_blocks_is_refused():
    with pytest.raises(BadInputError, match="num_blocks 0 must be 1 or more"):
        RunnerOptions(num_blocks=0)


def test_the_record_says_which_backend_runs_and_who_chose():
    runner = ModelRunner(checkpoint(), SMALL)
    assert (runner.selection.backend, runner.selection.chosen_by) == (runner.backend.name, "preference")


def test_an_override_counts_when_the_runner_is_made(monkeypatch):
    with forced_backend("TORCH_SDPA"):
        assert ModelRunner(checkpoint(), SMALL).selection.chosen_by == "context"
    monkeypatch.setenv("HEEDFUL_ATTENTION_BACKEND", "TORCH_SDPA")
    assert ModelRunner(checkpoint(), SMALL).selection.chosen_by == "environment"


def test_an_override_that_cannot_serve_is_an_error_with_its_reasons(monkeypatch):
    monkeypatch.setenv("HEEDFUL_ATTENTION_BACKEND", "FLASH_ATTN")
    with pytest.raises(SelectionError, match="FLASH_ATTN"):
        ModelRunner(checkpoint(), SMALL)


def test_a_simulated_device_is_refused_before_anything_is_made(monkeypatch):
    record = replace(model_runner.explain(SelectionRequest(16)), device=Device("cuda", capability=(9, 0)))
    monkeypatch.setattr(model_runner, "explain", lambda request: record)
    with pytest.raises(BackendUnavailableError, match=r"run on cuda 9\.0, but that device is only simulated here"):
        ModelRunner(checkpoint(), SMALL)


def test_an_emulated_run_needs_a_backend_that_has_an_emulation(monkeypatch):
    record = replace(model_runner.explain(SelectionRequest(16)), device=Device("tpu", arch="v5e"))
    monkeypatch.setattr(model_runner, "explain", lambda request: record)
    options = replace(SMALL, emulated=True)
    with pytest.raises(BackendUnavailableError, match="TORCH_SDPA has no emulation"):
        ModelRunner(checkpoint(), options)
    monkeypatch.setattr(TorchSdpaBackend, "EMULATES", True)
    assert ModelRunner(checkpoint(), options).device.type == "cpu"


def test_parts_that_choose_different_backends_are_an_error(monkeypatch):
    ask = model_runner.get_attn_backend
    answers = iter([ask, lambda *a: type("Other", (ask(*a),), {"name": "OTHER"})])
    monkeypatch.setattr(model_runner, "get_attn_backend", lambda *a: next(answers)(*a))
    with pytest.raises(SelectionError, match="attention layer chose OTHER"):
        ModelRunner(checkpoint(), SMALL)


def test_logits_that_are_not_finite_are_an_error_that_names_the_backend():
    made = checkpoint()
    made.weights["model.norm.weight"][3] = float("nan")
    with pytest.raises(HeedfulError, match=r"TORCH_SDPA in float32 gave logits that are not finite"):
        ModelRunner(made, SMALL)


def test_weights_that_do_not_fit_are_named():
    made = checkpoint()
    weights = {name: tensor for name, tensor in made.weights.items() if name != "model.norm.weight"}
    weights |= {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64), "rotary.inv_freq": torch.zeros(3)}
    with pytest.raises(WeightsError) as error:
        ModelRunner(replace(made, weights=weights), SMALL)
    for part in ("model.norm.weight is missing", "q_proj.bias is not part", "rotary.inv_freq has shape (3,), not (8,)"):
        assert part in str(error.value)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(BadInputError, match="unknown dtype 'float8'"):
        ModelRunner(checkpoint(), replace(SMALL, dtype="float8"))
