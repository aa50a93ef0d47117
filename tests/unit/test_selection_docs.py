import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT, PAGE = ROOT / "scripts" / "selection_docs.py", ROOT / "docs" / "selection.md"


def test_the_tables_of_the_selection_page_are_current():
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_table_that_is_not_current_is_found(tmp_path):
    copy = tmp_path / "scripts" / SCRIPT.name
    copy.parent.mkdir()
    copy.write_text(SCRIPT.read_text())
    page = tmp_path / "docs" / PAGE.name
    page.parent.mkdir()
    page.write_text(PAGE.read_text().replace("| cuda | FLASH_ATTN, XFORMERS", "| cuda | XFORMERS"))
    done = subprocess.run([sys.executable, str(copy), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "+| cuda | FLASH_ATTN, XFORMERS, FLASHINFER, TRITON_ATTN |" in done.stdout


def test_the_snippet_of_the_page_runs_and_shows_a_record():
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("FLASHINFER on cuda 9.0, chosen by preference (policy strict)")
