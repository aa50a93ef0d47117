"""generate(): text as it comes, and the record of what made it."""

import pytest

from heedful.errors import BadInputError, SelectionError
from heedful.runner import RunnerOptions, SamplingParams, generate
from heedful.runner.streaming import encode_prompt
from heedful.selector import forced_backend
from runner.test_detokenise import ByteTokenizer
from runner.tiny import CONFIG, checkpoint, greedy

SMALL = RunnerOptions(num_blocks=16)


class LetterTokenizer(ByteTokenizer):
    """Token n is the n-th letter from A."""

    def encode(self, text, *, add_special_tokens=True):
        return [ord(letter) - 65 for letter in text]

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(chr(65 + token) for token in token_ids)


class ChatTokenizer(LetterTokenizer):
    chat_template = "{{ messages }}"

    def apply_chat_template(self, conversation, **options):
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"[{turn['content']}]" for turn in conversation)


def start(prompt="HELLO", tokens=8, **options):
    made = checkpoint(tokenizer=LetterTokenizer())
    return generate(prompt, SamplingParams(max_tokens=tokens), checkpoint=made, options=SMALL, **options)


def test_pieces_come_one_by_one_and_join_to_the_text():
    made = start()
    pieces = [next(made), next(made)]
    assert made.text == "".join(pieces)
    assert made.request.finish_reason is None
    pieces += made
    assert len(pieces) == 8
    expected = greedy(LetterTokenizer().encode("HELLO"), 8)
    assert made.text == "".join(pieces) == LetterTokenizer().decode(expected)
    assert made.request.finish_reason == "length"


def test_it_names_the_backend_and_why():
    made = start()
    assert made.backend == "TORCH_SDPA"
    assert made.selection.chosen_by == "preference"
    assert "TORCH_SDPA on cpu, chosen by preference" in str(made.selection)


def test_a_backend_can_be_insisted_on():
    assert start(backend="TORCH_SDPA").selection.chosen_by == "context"
    with pytest.raises(SelectionError, match="FLASH_ATTN"):
        start(backend="FLASH_ATTN")


def test_the_choice_is_made_at_the_call_and_not_at_the_first_piece():
    with forced_backend("TORCH_SDPA"):
        made = start()
    assert made.selection.chosen_by == "context"
    assert len("".join(made)) == 8


def test_a_chat_template_wraps_the_prompt_unless_told_otherwise():
    tokenizer = ChatTokenizer()
    assert encode_prompt(tokenizer, "HI") == tokenizer.encode("[HI]")
    assert encode_prompt(tokenizer, "HI", chat=False) == tokenizer.encode("HI")
    assert encode_prompt(LetterTokenizer(), "HI") == tokenizer.encode("HI")


def test_an_empty_prompt_and_a_checkpoint_without_tokenizer_are_refused():
    with pytest.raises(BadInputError, match="prompt is empty"):
        start("")
    with pytest.raises(BadInputError, match="checkpoint tiny has no tokenizer"):
        generate("HI", checkpoint=checkpoint(CONFIG), options=SMALL)
