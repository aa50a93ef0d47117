import inspect

import pytest

from heedful import errors

CLASSES = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, errors.HeedfulError)]


def test_every_family_has_its_own_exit_code():
    families = {}
    for one in CLASSES:
        if "exit_code" in vars(one):
            families.setdefault(one.exit_code, []).append(one.__name__)
    assert all(len(names) == 1 for names in families.values()), families


def test_no_error_ends_like_a_result():
    assert not {one.exit_code for one in CLASSES} & {0, 1, 3}


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.__name__)
def test_every_error_can_be_raised_with_a_message_alone(one):
    with pytest.raises(one, match="what to do"):
        raise one("what to do")


def test_the_refusals_of_the_migration_policy_are_also_what_the_release_raised():
    assert issubclass(errors.BadInputError, ValueError)
    assert issubclass(errors.AssertedSelectionError, AssertionError)
    assert issubclass(errors.AttributeSelectionError, AttributeError)
    for one in (errors.AssertedSelectionError, errors.AttributeSelectionError):
        assert one("text", "record").selection == "record"
        assert one.exit_code == errors.SelectionError.exit_code


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("TORCH_SPDA", "; did you mean 'TORCH_SDPA'?"),
        ("flash-attn", "; did you mean 'FLASH_ATTN'?"),
        ("FLASH_ATTN ", "; did you mean 'FLASH_ATTN'?"),
        ("", ""),
        ("quite another thing", ""),
    ],
)
def test_the_nearest_word_is_named_whatever_its_case_dashes_and_spaces(given, hint):
    assert errors.did_you_mean(given, ("TORCH_SDPA", "FLASH_ATTN")) == hint
