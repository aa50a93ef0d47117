"""Report files: what is written comes back, whole or not at all; whatever is no report of ours is one clear error."""

import gzip
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from heedful.conformance.results import CheckResult, Outcome
from heedful.errors import BadInputError, ReportError
from heedful.report import Report
from heedful.report.schema import load_schema

from .conftest import NOT_SUPPORTED, PASS, expected, report_of, result


def nans_told(report):
    """A report as text, since NaN is not equal to itself."""
    return json.dumps(report.to_dict())


@pytest.mark.parametrize("name", ["r.json", "r.json.gz"])
def test_a_report_comes_back_as_it_was(tmp_path, report, name):
    report.write(tmp_path / "deep" / name)
    assert nans_told(Report.load(tmp_path / "deep" / name)) == nans_told(report)


TEXT = st.text(st.characters(codec=None), max_size=30)
WORDS = st.dictionaries(TEXT, TEXT, max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
RESULTS = st.lists(
    st.builds(
        CheckResult,
        lane=TEXT,
        id=TEXT,
        outcome=st.sampled_from(Outcome),
        detail=TEXT,
        reason=st.none() | WORDS,
        margins=st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3),
        seconds=st.floats(min_value=0, max_value=1e6),
        seed=st.integers(min_value=0),
        facts=st.dictionaries(TEXT.filter(lambda key: key != "selection"), JSON, max_size=3),
    ),
    max_size=4,
    unique_by=lambda r: (r.lane, r.id),
)


@given(results=RESULTS, suffix=st.sampled_from([".json", ".json.gz"]), only=st.lists(TEXT, max_size=2))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_results_come_back_equal(tmp_path_factory, results, suffix, only):
    path = tmp_path_factory.mktemp("round") / f"r{suffix}"
    cells = [expected("a[x]"), expected("b[x]", NOT_SUPPORTED, {"code": "SINKS"})]
    report = report_of(cells, results, only=only)
    report.write(path)
    assert Report.load(path) == report


def test_equal_reports_are_equal_files_one_row_a_line(tmp_path, report):
    for name in ("a.json.gz", "b.json.gz", "a.json"):
        report.write(tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    text = (tmp_path / "a.json").read_text(encoding="ascii")
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()).decode("ascii") == text
    rows = [line for line in text.splitlines() if '"reproduce"' in line]
    assert len(rows) == len(report.results)


def test_a_margin_that_is_no_number_is_legal_json(tmp_path, report):
    report.write(tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text(encoding="ascii")
    assert '"margins": {"output": "NaN"}' in text
    assert json.loads(text, parse_constant=pytest.fail)


def test_the_written_form_obeys_the_published_schema(report):
    schema = load_schema("heedful.report", "report.schema.json")
    Draft202012Validator.check_schema(schema)
    assert [e.message for e in Draft202012Validator(schema).iter_errors(report.to_dict())] == []


def test_the_schema_has_the_ten_outcomes():
    schema = load_schema("heedful.report", "report.schema.json")
    assert schema["$defs"]["outcome"]["enum"] == list(Outcome)


def test_another_name_is_refused_before_anything_is_written(tmp_path, report):
    with pytest.raises(BadInputError, match=r"ends in \.json or \.json\.gz, not to .*r\.txt"):
        report.write(tmp_path / "r.txt")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, report, monkeypatch):
    path = tmp_path / "r.json"
    path.write_text("old")

    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReportError, match=r"cannot write the report to .*r\.json: No space left on device"):
        report.write(path)
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert path.read_text() == "old"


def test_a_folder_that_is_a_file_cannot_hold_a_report(tmp_path, report):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot write the report to .*: (Not a directory|File exists)"):
        report.write(tmp_path / "file" / "r.json")


def refusal(path):
    with pytest.raises(ReportError) as caught:
        Report.load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{path}", "FILE")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "FILE is empty; its writer was stopped, run the suite again"),
        (b"hello", "FILE is damaged, or no JSON at all: Expecting value at line 1, column 1"),
        (b"\xff\xfe\xfd{}", "FILE is no text file: "),
        (b"[1, 2]", "FILE is JSON but not a report of heedful: its kind is not 'heedful.report'"),
        (b'{"kind": "ctrf"}', "FILE is JSON but not a report of heedful: its kind is not 'heedful.report'"),
        (b'{"a": NaN}', "FILE is not JSON that a report can hold: NaN is no JSON number"),
        (b"[" * 100_000, "FILE is not JSON that a report can hold: "),
        (b"9" * 10_000, "FILE is not JSON that a report can hold: "),
        (b"\x1f\x8bgarbage", "FILE is a gzip file that is truncated or damaged: "),
        (
            b'{"kind": "heedful.report", "version": 2}',
            "FILE is of report version 2, this heedful reads 1; a newer heedful wrote it: upgrade",
        ),
        (
            b'{"kind": "heedful.report", "version": "1"}',
            "FILE is of report version '1', this heedful reads 1; write it again with this heedful",
        ),
        (
            b'{"kind": "heedful.report", "version": 1}',
            "FILE breaks the report schema: the whole document: 'partial' is missing; the whole document: 'only' is "
            "missing; the whole document: 'summary' is missing; the whole document: 'plan_hash' is missing; "
            "the whole document: 'profiles' is missing; and 4 more",
        ),
    ],
)
def test_a_foreign_file_is_one_clear_error(tmp_path, content, message):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    assert refusal(path).startswith(message)


@pytest.mark.parametrize("name", ["r.json", "r.json.gz"])
def test_a_file_cut_anywhere_is_refused(tmp_path, report, name):
    path = tmp_path / name
    report.write(path)
    content = path.read_bytes()
    for length in range(2, len(content) - 2, max(1, len(content) // 60)):
        path.write_bytes(content[:length])
        assert "truncated" in refusal(path)


def test_a_missing_file_and_a_folder_say_so(tmp_path):
    assert refusal(tmp_path / "none.json") == "cannot read report FILE: No such file or directory"
    assert refusal(tmp_path) == "cannot read report FILE: Is a directory"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["results"][1].update(outcome="PASS"), "FILE: its summary does not follow from its cells"),
        (lambda d: d["results"].pop(2), "FILE: its summary does not follow from its cells"),
        (lambda d: d["expected"].pop(), "FILE: its plan_hash does not follow from its cells"),
        (lambda d: d["results"].append(d["results"][0]), "FILE: cell cpu/TORCH_SDPA/prefill[bf16-d64] of cpu.hardware"),
        (
            lambda d: d["results"][0].update(outcome="PASSED"),
            "FILE breaks the report schema: results.0.outcome: \"PASSED\" is not legal here (did you mean 'PASS'?)",
        ),
        (
            lambda d: d["results"][3].update(seconds="fast"),
            'FILE breaks the report schema: results.3.seconds: "fast" is not a number',
        ),
        (
            lambda d: d["provenance"].update(image="sha256:abc"),
            'FILE breaks the report schema: provenance.image: "sha256:abc" does not have the form',
        ),
    ],
)
def test_a_report_that_was_changed_by_hand_is_refused(tmp_path, report, change, message):
    document = report.to_dict()
    change(document)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    assert refusal(path).startswith(message)


def test_a_gzip_file_is_known_by_its_content_not_its_name(tmp_path):
    one = report_of([expected("a[x]")], [result("a[x]", PASS)])
    one.write(tmp_path / "a.json.gz")
    (tmp_path / "a.json.gz").rename(tmp_path / "b.json")
    assert Report.load(tmp_path / "b.json") == one
