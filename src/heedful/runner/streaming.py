"""Text in, text out as it comes: what ``heedful generate`` shows to a person."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

from heedful.errors import BadInputError
from heedful.runner.detokenise import Detokeniser
from heedful.runner.engine import Engine
from heedful.runner.model_runner import ModelRunner, RunnerOptions
from heedful.runner.sampling import SamplingParams
from heedful.runner.weights import Checkpoint, Tokenizer, load_smollm2
from heedful.selector import forced_backend

if TYPE_CHECKING:
    from heedful.runner.scheduler import Request
    from heedful.types import Selection


class Generation(Iterator[str]):
    """The text of one answer, piece by piece, and what made it. Iterating runs the model.

    selection: the record that says which backend runs and why. text: what came so far. request: its tokens and, at
    the end, its finish_reason.
    """

    def __init__(
        self, runner: ModelRunner, tokenizer: Tokenizer, prompt_ids: list[int], params: SamplingParams
    ) -> None:
        self.selection: Selection = runner.selection
        self.text = ""
        self._engine = Engine(runner)
        self._detokeniser = Detokeniser(tokenizer)
        self.request: Request = self._engine.add(prompt_ids, params)
        self._pieces = self._run()

    @property
    def backend(self) -> str:
        """The name of the backend that runs."""
        return self.selection.backend or ""

    def __next__(self) -> str:
        piece = next(self._pieces)
        self.text += piece
        return piece

    def _run(self) -> Iterator[str]:
        while self._engine.unfinished:
            for request in self._engine.step():
                yield from filter(None, [self._detokeniser.push(request.tokens[-1])])
        yield from filter(None, [self._detokeniser.flush()])


def generate(
    prompt: str,
    params: SamplingParams | None = None,
    *,
    checkpoint: Checkpoint | None = None,
    options: RunnerOptions | None = None,
    backend: str | None = None,
    chat: bool = True,
) -> Generation:
    """Start an answer to the prompt; iterate over the result for its pieces of text.

    checkpoint: load_smollm2() when None. backend: a name to insist on, else what selection gives. chat: put the prompt
    as a user's turn into the model's chat template; without one, or with False, the text is continued as it stands.
    Errors, all before the first piece: WeightsError, SelectionError, BackendUnavailableError, BadInputError.
    """
    checkpoint = checkpoint or load_smollm2((options or RunnerOptions()).dtype or "float32")
    if checkpoint.tokenizer is None:
        raise BadInputError(
            f"the checkpoint {checkpoint.source or 'in memory'} has no tokenizer; use Engine with token ids"
        )
    prompt_ids = encode_prompt(checkpoint.tokenizer, prompt, chat=chat)
    with forced_backend(backend) if backend is not None else nullcontext():
        runner = ModelRunner(checkpoint, options)
    return Generation(runner, checkpoint.tokenizer, prompt_ids, params or SamplingParams())


def encode_prompt(tokenizer: Tokenizer, prompt: str, *, chat: bool = True) -> list[int]:
    """Token ids of a prompt, as a user's turn where the tokenizer has a chat template and chat is True."""
    if not prompt:
        raise BadInputError("the prompt is empty; give some text")
    if not chat or not tokenizer.chat_template:
        return tokenizer.encode(prompt)
    turn = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
