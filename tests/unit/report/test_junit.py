"""JUnit: the whole document once, then that every text makes legal XML."""

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from heedful.report import Report, junit

from .conftest import CRASH, FAIL, NOT_SUPPORTED, PASS, cell_id, expected, report_of, result

GOLDEN = """\
<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="heedful" tests="8" failures="1" errors="2" skipped="3" time="1.500">
  <testsuite name="cpu.hardware" timestamp="2026-12-01T05:00:00" tests="7" failures="1" errors="2" skipped="3" time="1.500">
    <properties>
      <property name="heedful.version" value="1.2.3" />
      <property name="heedful.commit" value="c0ffee (dirty)" />
      <property name="heedful.plan_hash" value="02aba93e9f6284c2c682fac7c6e8fdfec5107289bf0b7056f3cbb38e171f0693" />
      <property name="heedful.profile" value="ci" />
      <property name="heedful.partial" value="no" />
      <property name="device" value="cpu" />
      <property name="cpu" value="Example 9000" />
      <property name="torch" value="2.13.0+cpu" />
      <property name="image" value="host" />
    </properties>
    <testcase classname="cpu.hardware.TORCH_SDPA" name="prefill[bf16-d64]" time="1.000">
      <properties>
        <property name="outcome" value="PASS" />
        <property name="margin.output" value="0.25" />
        <property name="margin.lse" value="0.5" />
        <property name="reproduce" value="heedful conform --only 'cpu/TORCH_SDPA/prefill[bf16-d64]'" />
      </properties>
    </testcase>
    <testcase classname="cpu.hardware.TORCH_SDPA" name="decode[bf16-d64]" time="0.000">
      <properties>
        <property name="outcome" value="FAIL" />
        <property name="margin.output" value="nan" />
        <property name="reproduce" value="heedful conform --only 'cpu/TORCH_SDPA/decode[bf16-d64]'" />
      </properties>
      <failure type="FAIL" message="FAIL, planned PASS: output differs">output differs
at row 3 | col 1

reproduce: heedful conform --only 'cpu/TORCH_SDPA/decode[bf16-d64]'</failure>
    </testcase>
    <testcase classname="cpu.hardware.TORCH_SDPA" name="decode[f32-d64]" time="0.500">
      <properties>
        <property name="outcome" value="CRASH" />
        <property name="reproduce" value="heedful conform --only 'cpu/TORCH_SDPA/decode[f32-d64]'" />
      </properties>
      <error type="CRASH" message="CRASH, planned PASS: signal 11">signal 11

reproduce: heedful conform --only 'cpu/TORCH_SDPA/decode[f32-d64]'</error>
    </testcase>
    <testcase classname="cpu.hardware.TORCH_SDPA" name="sinks[bf16-d64]" time="0.000">
      <properties>
        <property name="outcome" value="NOT_SUPPORTED" />
        <property name="reproduce" value="heedful conform --only 'cpu/TORCH_SDPA/sinks[bf16-d64]'" />
      </properties>
      <skipped type="NOT_SUPPORTED" message="NOT_SUPPORTED: SINKS: sdpa has no sinks" />
    </testcase>
    <testcase classname="cpu.hardware.TORCH_SDPA" name="window[bf16-d64]" time="0.000">
      <properties>
        <property name="outcome" value="WAIVED" />
        <property name="reproduce" value="heedful conform --only 'cpu/TORCH_SDPA/window[bf16-d64]'" />
      </properties>
      <skipped type="WAIVED" message="WAIVED: off by 3" />
    </testcase>
    <testcase classname="cpu.hardware.NO_ATTENTION" name="free[free-empty]" time="0.000">
      <properties>
        <property name="outcome" value="NOT_RUN" />
        <property name="reproduce" value="heedful conform --only 'cpu/NO_ATTENTION/free[free-empty]'" />
      </properties>
      <skipped type="NOT_RUN" message="NOT_RUN: no device answers" />
    </testcase>
    <testcase classname="cpu.hardware.TORCH_SDPA" name="late[bf16-d64]" time="0.000">
      <error type="LOST" message="no result, planned PASS: the run ended before this cell" />
    </testcase>
  </testsuite>
  <testsuite name="cpu.select" timestamp="2026-12-01T05:00:00" tests="1" failures="0" errors="0" skipped="0" time="0.000">
    <properties>
      <property name="heedful.version" value="1.2.3" />
      <property name="heedful.commit" value="c0ffee (dirty)" />
      <property name="heedful.plan_hash" value="02aba93e9f6284c2c682fac7c6e8fdfec5107289bf0b7056f3cbb38e171f0693" />
      <property name="heedful.profile" value="" />
      <property name="heedful.partial" value="no" />
      <property name="device" value="cpu" />
      <property name="cpu" value="Example 9000" />
      <property name="torch" value="2.13.0+cpu" />
      <property name="image" value="host" />
    </properties>
    <testcase classname="cpu.select.SELECT" name="bf16" time="0.000">
      <properties>
        <property name="outcome" value="PASS" />
        <property name="reproduce" value="heedful conform --only 'cpu/SELECT/bf16'" />
      </properties>
    </testcase>
  </testsuite>
</testsuites>
"""  # noqa: E501 (a golden text stands as it is written)


def test_the_document_reads_as_it_should(report):
    assert junit.render(report) == GOLDEN


def test_it_is_rendered_alike_from_the_file(tmp_path, report):
    report.write(tmp_path / "r.json.gz")
    assert junit.render(Report.load(tmp_path / "r.json.gz")) == junit.render(report)


@given(st.text(st.characters(codec=None), max_size=40))
def test_any_text_anywhere_is_legal_xml_that_keeps_what_can_be_seen(text):
    failed = result(f"a{text}", FAIL, detail=text, lane=f"l{text}", margins={text: 1.0})
    refused = result(f"b{text}", NOT_SUPPORTED, reason={"code": text, "text": text})
    document = junit.render(report_of([], [failed, refused], profiles={text: text}, only=(text,)))
    root = ElementTree.fromstring(document.encode())
    assert root.get("tests") == "2"
    seen = "".join(char for char in text if char.isprintable())
    told = "".join(char for char in root.iter("failure").__next__().text or "" if char.isprintable())
    assert all(char in told for char in seen)


def test_control_characters_are_spelled_out():
    report = report_of([expected("a[x]")], [result("a[x]", CRASH, detail="\x1b[31mred\x00\ufffe\ud800\r\nnext")])
    (error,) = ElementTree.fromstring(junit.render(report)).iter("error")
    assert error.text.startswith("\\x1b[31mred\\x00\\ufffe\\ud800\nnext")


def test_a_lost_claim_is_a_failure_and_so_is_a_cell_that_nobody_planned():
    cells = [expected("a[x]"), expected("b[x]", NOT_SUPPORTED)]
    results = [result("a[x]", NOT_SUPPORTED, reason={"code": "SINKS", "text": "gone"}), result("b[x]"), result("c[x]")]
    root = ElementTree.fromstring(junit.render(report_of(cells, results)))
    assert [f.get("message") for f in root.iter("failure")] == [
        "NOT_SUPPORTED, planned PASS: SINKS: gone",
        "PASS, planned NOT_SUPPORTED: no reason given",
        "PASS, not planned: no reason given",
    ]
    assert root.get("failures") == "3"


def test_a_partial_report_holds_only_the_cells_it_ran():
    cells = [expected("a[x]"), expected("b[x]", lane="cpu.emulated")]
    root = ElementTree.fromstring(junit.render(report_of(cells, [result("a[x]", PASS)], only=(cell_id("a[x]"),))))
    assert [suite.get("name") for suite in root] == ["cpu.hardware"]
    properties = {p.get("name"): p.get("value") for p in root.iter("property")}
    assert properties["heedful.partial"] == "cpu/TORCH_SDPA/a[x]"
