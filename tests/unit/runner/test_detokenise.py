"""Pieces join to the whole text, and no piece ends inside a character."""

from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.runner.detokenise import Detokeniser

END = 256


class ByteTokenizer:
    """A token a byte, and one special token; with strips_start, a text's first space is dropped, as some do."""

    chat_template = None

    def __init__(self, strips_start=False):
        self._strips_start = strips_start

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=False):
        text = bytes(t for t in token_ids if t != END).decode("utf-8", errors="replace")
        text += "" if skip_special_tokens else "<end>" * list(token_ids).count(END)
        return text.removeprefix(" ") if self._strips_start else text


def pieces(token_ids, tokenizer=None):
    stream = Detokeniser(tokenizer or ByteTokenizer())
    return [*map(stream.push, token_ids), stream.flush()]


def test_a_character_of_several_tokens_comes_whole():
    assert pieces("a€b".encode()) == ["a", "", "", "€", "b", ""]


def test_bytes_that_never_become_a_character_come_at_the_end():
    assert pieces([*b"a", 0xE2, 0x82]) == ["a", "", "", "\ufffd"]


def test_special_tokens_give_no_text():
    assert "".join(pieces([*b"hi", END])) == "hi"


def test_a_space_between_words_survives_a_tokenizer_that_drops_the_first():
    assert "".join(pieces(b" one two  three", ByteTokenizer(strips_start=True))) == "one two  three"


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=30), st.booleans())
def test_pieces_join_to_the_text_decoded_at_once(text, strips_start):
    tokenizer = ByteTokenizer(strips_start)
    ids = tokenizer.encode(text)
    got = pieces(ids, tokenizer)
    assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=20))
def test_any_bytes_join_to_the_text_decoded_at_once(ids):
    assert "".join(pieces(ids)) == ByteTokenizer().decode(ids, skip_special_tokens=True)
