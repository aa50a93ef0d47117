"""What checks are made of: refusals that must come, bits that must be equal, parts of a step, cells out of reach."""

from dataclasses import replace

import pytest
import torch

from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.conformance import checks_cache
from heedful.conformance.bench import Bench, OutOfReachError, agree, merged, must_refuse, on_device, same_bits
from heedful.conformance.checklist import CHECKS, CROSS, PLAIN, but, forms_of, known
from heedful.conformance.checks_cache import (
    check_a_write_stores_exact_bytes,
    check_slots_past_32_bits_are_exact,
    same_pages,
)
from heedful.conformance.closed_forms import FORMS
from heedful.conformance.cuts import Piece, chunks, cut, rows_of, whole
from heedful.conformance.inputs import build
from heedful.conformance.pool import Workers
from heedful.conformance.probe import probe
from heedful.conformance.refusals import prove_refusal
from heedful.conformance.results import Fidelity, Outcome
from heedful.conformance.tolerance import OutOfToleranceError
from heedful.conformance.worker import Order, run_cell
from heedful.errors import BadInputError, MetadataError, UnsupportedError
from heedful.types import PLATFORMS

SMALL = but(head_size=32, dtype="float32")


def raises(error):
    def action():
        raise error

    return action


def test_a_refusal_of_the_right_kind_is_taken():
    must_refuse(raises(MetadataError("bad")), "a step", MetadataError)


def test_no_refusal_and_a_refusal_of_another_kind_fail():
    with pytest.raises(AssertionError, match="a step was taken without a word"):
        must_refuse(lambda: None, "a step", MetadataError)
    with pytest.raises(AssertionError, match=r"a step raised IndexError \(out\); it must be MetadataError"):
        must_refuse(raises(IndexError("out")), "a step", MetadataError)


def test_bits_tell_zeros_apart_and_nan_equals_itself():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, torch.zeros(2))


def test_several_judgements_keep_the_largest_share_of_each_measure():
    assert merged([{"max": 0.1, "rms": 0.5}, {"max": 0.3}]) == {"max": 0.3, "rms": 0.5}


def test_a_wrong_answer_says_what_was_asked_and_keeps_its_margins():
    bench = Bench(TorchSdpaBackend, SMALL)
    with pytest.raises(OutOfToleranceError, match="in steps of 3 tokens: ") as error:
        agree(bench.on_host.expected(), bench.forward() + 1, what="in steps of 3 tokens")
    assert error.value.margins["max"] > 1


def test_a_cut_batch_gives_the_rows_of_the_whole():
    batch = build(SMALL)
    order = [Piece(1, 0, 3), Piece(3, 0, 1, decode=True)]
    part = cut(batch, order)
    rows = rows_of(batch, order)
    assert rows.tolist() == [6, 7, 8, 10]
    assert torch.equal(part.query, batch.query[rows])
    torch.testing.assert_close(part.expected().output, batch.expected().output[rows])


def test_chunks_take_every_token_once_and_single_tokens_after_the_first_are_decodes():
    batch = build(but(batch="prefill", head_size=32))
    for size in (1, 3, 100):
        steps = list(chunks(batch, size))
        taken = sorted((p.sequence, t) for pieces in steps for p in pieces for t in range(p.start, p.stop))
        assert taken == [(p.sequence, t) for p in whole(batch) for t in range(p.stop)]
    decodes = [[p.decode for p in pieces] for pieces in chunks(batch, 1)]
    assert not any(decodes[0])
    assert all(all(step) for step in decodes[1:])


def test_a_differing_slot_is_named():
    right = torch.zeros(3, 4, 2, 8)
    wrong = right.clone()
    wrong[2, 1, 0, 5] = 1.5
    with pytest.raises(
        AssertionError, match=r"1 elements of V differ; first block 2, offset 1, KV head 0, element 5: 1.5"
    ):
        same_pages((right, wrong), (right, right), "after the write")


class Opaque(TorchSdpaBackend):
    """A cache whose layout nobody may look into."""

    name = "OPAQUE"

    @staticmethod
    def kv_views(kv_cache):
        return None


def test_bytes_of_an_opaque_cache_are_out_of_reach_not_passed():
    with pytest.raises(OutOfReachError, match="opaque"):
        check_a_write_stores_exact_bytes(Opaque, SMALL)


def test_an_opaque_cache_is_filled_by_the_backend_itself_and_still_judged():
    bench = Bench(Opaque, but(batch="chunked", head_size=32))
    agree(bench.on_host.expected(), bench.forward())


def test_a_cache_that_cannot_be_allocated_is_not_run_and_says_why(monkeypatch):
    def refuse(*_shape, **_options):
        raise RuntimeError("not enough memory: you tried to allocate 8 GiB")

    case = but(batch="decode", num_heads=16, num_kv_heads=16)
    with monkeypatch.context() as patch:
        patch.setattr(checks_cache.torch, "empty", refuse)
        with pytest.raises(OutOfReachError, match="cannot be allocated here: not enough memory"):
            check_slots_past_32_bits_are_exact(TorchSdpaBackend, case)


def test_what_is_out_of_reach_ends_as_not_run():
    case = but(head_size=32)
    ended = run_cell(Order(f"{__name__}:Opaque", "a_write_stores_exact_bytes", "checks_cache", case))
    assert ended.outcome == Outcome.NOT_RUN
    assert "opaque" in ended.detail


def test_an_error_that_is_no_assertion_tells_its_type_and_place():
    ended = run_cell(Order("no_such_module:Backend", "lse_agrees_with_reference", "checks_numeric", PLAIN))
    assert ended.outcome in (Outcome.FAIL, Outcome.NOT_RUN)
    assert "no_such_module" in ended.detail


class Words(TorchSdpaBackend):
    """Refuses sinks, in one word or another."""

    name = "WORDS"
    error: Exception = UnsupportedError("no sinks here")

    @classmethod
    def get_impl_cls(cls):
        class Impl(TorchSdpaBackend.get_impl_cls()):
            def __init__(self, *args, **kwargs):
                if kwargs.get("sinks") is not None:
                    raise cls.error
                super().__init__(*args, **kwargs)

        return Impl


REASON = {"code": "SINKS", "text": "no sinks", "asked": "sinks"}


def test_a_refusal_is_proven_by_unsupported_error_alone():
    case = but(sinks=True, head_size=32)
    prove_refusal(Words, case, REASON, with_lse=False)
    with pytest.raises(AssertionError, match="computed without a word"):
        prove_refusal(TorchSdpaBackend, case, REASON, with_lse=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Words, "error", BadInputError("no"))
        with pytest.raises(AssertionError, match="it must be UnsupportedError"):
            prove_refusal(Words, case, REASON, with_lse=False)


def test_every_closed_form_that_a_step_can_ask_has_its_cell():
    asked = {form.name for case in known("float32") for form in forms_of(case)}
    assert asked == {form.name for form in FORMS if not form.reference_only}


def test_no_check_names_a_backend():
    from importlib import import_module
    from pathlib import Path

    from heedful.registry import names

    for module in {check.module for check in CHECKS}:
        text = Path(import_module(f"heedful.conformance.{module}").__file__).read_text(encoding="utf-8")
        assert [name for name in names() if name in text] == [], module


def test_every_lane_is_probed_and_answers_for_itself_alone():
    lanes = [(platform, fidelity) for platform in PLATFORMS for fidelity in Fidelity]
    with Workers() as workers:
        found = {lane: workers.probe(*lane) for lane in lanes}
    assert found["cpu", Fidelity.HARDWARE].fidelity == Fidelity.HARDWARE
    for (_, fidelity), answer in found.items():
        assert answer.fidelity in (None, fidelity)
        assert (answer.fidelity is None) == bool(answer.text)


def test_a_lane_that_nothing_probes_is_out_of_reach():
    assert "proves nothing of cpu at fidelity compiled" in probe("cpu", Fidelity.COMPILED).text


def test_the_device_under_test_holds_for_what_runs_inside():
    from heedful.conformance.bench import device

    with on_device("meta"):
        assert device() == "meta"
    assert device() == "cpu"


def test_cross_attention_refuses_positions_in_construction_or_forward():
    for feature in ({"alibi": True}, {"sliding_window": 7}):
        prove_refusal(TorchSdpaBackend, replace(CROSS, **feature), None, with_lse=False)
