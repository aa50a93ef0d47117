"""README and docs: commands are run and compared, snippets are executed, generated parts are current, links lead on."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from heedful.cli import main

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(path: Path) -> list[tuple[str, str]]:
    """(command, the output shown under it) of every console block; no output shown means that none is promised."""
    found = "".join(blocks(path, "console"))
    return [
        (command.strip(), shown) for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", found, re.MULTILINE)
    ]


OWN = [(c, shown) for c, shown in commands(README) if c.startswith("heedful ") and not c.startswith("heedful generate")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the kernel of the README in it, and no settings."""
    for code in blocks(README, "python"):
        if name := re.match(r"# (\w+\.py)\n", code):
            (tmp_path / name[1]).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("HEEDFUL_PLATFORM", "cpu")
    return tmp_path


@pytest.mark.parametrize(("command", "shown"), OWN, ids=[command for command, _ in OWN])
def test_readme_commands_print_what_it_shows(command, shown, folder, capsys):
    main(shlex.split(command)[1:])
    told = capsys.readouterr().out
    flags = doctest.ELLIPSIS | doctest.REPORT_NDIFF
    assert shown, "a command of the README shows no output"
    assert doctest.OutputChecker().check_output(shown, told, flags), f"shown:\n{shown}\nprinted:\n{told}"


def test_readme_shows_selection_conformance_and_generation():
    words = {command.split()[1] for command, _ in commands(README) if command.startswith("heedful ")}
    assert words == {"select", "conform", "generate"}


def test_readme_kernel_is_refused_when_it_is_off_by_one(folder, capsys):
    kernel = folder / "my_kernel.py"
    right, wrong = "tril(length - len(rows))", "tril(length - len(rows) - 1)"
    assert right in kernel.read_text()
    (folder / "off_by_one.py").write_text(kernel.read_text().replace(right, wrong))
    only = "cpu/ATTEND/output_agrees_with_reference[f32-h4k2-d128-b16-*-normal]"
    assert main(["conform", "--backend", "off_by_one:MY_KERNEL", "--profile", "smoke", "--only", only]) == 1
    told = capsys.readouterr().out
    assert "FAIL, planned PASS" in told
    assert "again: heedful conform" in told


def test_readme_selection_runs_and_says_what_it_promises(folder):
    (code,) = [code for code in blocks(README, "python") if "get_attn_backend(" in code]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "TORCH_SDPA\n"


@pytest.mark.weights
def test_readme_generation_streams_text_and_names_the_backend(folder, capsys):
    (command,) = [command for command, _ in commands(README) if command.startswith("heedful generate")]
    assert main(shlex.split(command)[1:]) == 0
    told = capsys.readouterr()
    assert "Paris" in told.out
    assert "TORCH_SDPA on cpu, chosen by preference" in told.err


def test_scripts_named_in_the_docs_are_there_and_can_be_run():
    named = {word for page in PAGES for word in re.findall(r"\bscripts/[\w.-]*\w", page.read_text(encoding="utf-8"))}
    assert {"scripts/conform", "scripts/test"} <= named
    for name in named:
        path = ROOT / name
        assert path.is_file(), name
        assert path.stat().st_mode & 0o111 or path.suffix == ".py" or path.name == "environment", name


def test_generated_parts_are_current():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/docs", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_inside_the_repository_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_no_page_names_a_path_of_somebodys_machine():
    found = [
        page.name for page in PAGES if re.search(r"(?<!\w)/(?:work|root|tmp|home)/", page.read_text(encoding="utf-8"))
    ]
    assert found == []
