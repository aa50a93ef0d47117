"""The pages on reports and the matrix name every key of their schemas, and their examples work."""

import re
from pathlib import Path

import pytest

from heedful.errors import MatrixError
from heedful.harness.matrix import load_matrix
from heedful.report import Report
from heedful.report.schema import load_schema

DOCS = Path(__file__).parents[3] / "docs"
PAGES = [
    ("reports.md", "heedful.report", "report.schema.json", {"candidates"}),
    ("matrix.md", "heedful.harness", "matrix.schema.json", {"request", "platforms"}),
]


def keys(node, skip):
    """Every key of a schema, without what lies below the keys in ``skip``: another page tells of those."""
    for name, child in node.get("properties", {}).items():
        yield name
        yield from () if name in skip else keys(child, skip)
    yield from keys(node["items"], skip) if "items" in node else ()
    for name, child in node.get("$defs", {}).items():
        yield from () if name in skip else keys(child, skip)


@pytest.mark.parametrize(("page", "package", "name", "skip"), PAGES)
def test_a_page_names_every_key_of_its_schema(page, package, name, skip):
    told = set(re.findall(r"`([a-z_]+)`", (DOCS / page).read_text(encoding="utf-8")))
    assert sorted(set(keys(load_schema(package, name), skip)) - told) == []


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_on_reports_runs(report, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    report.write("report.json.gz")
    for example in blocks("reports.md", "python"):
        exec(compile(example, "reports.md", "exec"), {})
    out = capsys.readouterr().out
    assert out.startswith("1 {")
    assert "FAIL, planned PASS" in out
    assert Report.load("report.json.gz").exit_code == 1


def test_the_example_on_the_matrix_runs(monkeypatch, capsys):
    monkeypatch.chdir(DOCS.parent)
    for example in blocks("matrix.md", "python"):
        exec(compile(example, "matrix.md", "exec"), {})
    assert capsys.readouterr().out.startswith("matrix.yaml ['cpu', 'cuda'")


def test_the_matrix_that_is_shown_is_legal_and_so_is_its_refusal(tmp_path):
    (shown,) = blocks("matrix.md", "yaml")
    path = tmp_path / "matrix.yaml"
    path.write_text(shown.replace("profile: ci", "profile: smoke"), encoding="utf-8")
    assert load_matrix(path).row("cuda").waivers[0].owner == "ada"
    path.write_text(shown.replace("profile:", "profil:"), encoding="utf-8")
    (told,) = blocks("matrix.md", "text")
    with pytest.raises(MatrixError, match=re.escape(told.strip().removeprefix("matrix.yaml"))):
        load_matrix(path)
