"""Checks with known answers: every closed form that a case stands for, through the phase that its batch names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful.conformance.bench import Bench, merged
from heedful.conformance.checklist import forms_of, phase_of
from heedful.conformance.closed_form_runs import asked

if TYPE_CHECKING:
    from heedful.backends.base import AttentionBackend
    from heedful.conformance.bench import Margins
    from heedful.conformance.cases import Case


def check_known_answers_come_out(backend: type[AttentionBackend], case: Case) -> Margins:
    """Inputs whose right output a person can work out; the message names the defect that gives the value found."""
    found = []
    for form in forms_of(case):
        question = asked(form, case.dtype, phase_of(case), case.block_size)
        found.append(question.judge(Bench(backend, case, question.batch).forward()))
    return merged(found)


def check_known_lses_come_out(backend: type[AttentionBackend], case: Case) -> Margins:
    """The same forms with their LSE: natural log, the sink inside, -inf for nothing."""
    found = []
    for form in forms_of(case):
        question = asked(form, case.dtype, phase_of(case), case.block_size)
        bench = Bench(backend, case, question.batch)
        lse = bench.empty_lse()
        found.append(question.judge(bench.forward(output_lse=lse), lse))
    return merged(found)
