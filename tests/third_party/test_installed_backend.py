"""A third party's package, really installed into a folder of its own, offers its backend through its entry point."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "example"
REQUEST = "64, None, 'float32', 'auto', 16, False"


def install(source, target):
    """pip without network: no dependencies, no isolated build, no index."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder that holds the installed package; built from a copy, so that the sources stay clean."""
    folder = tmp_path_factory.mktemp("third_party")
    shutil.copytree(SOURCE, folder / "source")
    install(folder / "source", folder / "site")
    return folder / "site"


def run(code, *folders, **environ):
    """Run code in a new process that sees the folders as its installed packages; it prints one JSON value."""
    paths = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEEDFUL_", "VLLM_"))}
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        env=inherited | {"PYTHONPATH": paths} | environ,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_installed_backend_is_listed_after_the_built_in_ones(target):
    names = run("from heedful import registry\nprint(json.dumps(registry.names()))", target)
    assert names[-1] == "EXAMPLE_NAIVE"
    assert run("from heedful import registry\nprint(json.dumps(registry.names()))") == names[:-1]


def test_importing_heedful_and_choosing_by_preference_never_looks_at_it(target):
    code = f"""
from heedful import get_attn_backend
name = get_attn_backend({REQUEST}).name
print(json.dumps([name, "heedful_example" in sys.modules, "importlib.metadata" in sys.modules]))
"""
    assert run(code, target)[:2] == ["TORCH_SDPA", False]


def test_it_is_chosen_by_name_and_computes(target):
    code = f"""
import torch
from heedful import explain, get_attn_backend, SelectionRequest
backend = get_attn_backend({REQUEST})
impl = backend.get_impl_cls()(num_heads=4, head_size=64, scale=0.125, num_kv_heads=2)
selection = explain(SelectionRequest(64, dtype="float32"))
print(json.dumps([backend.name, backend.__module__, type(impl).__name__ != "", selection.chosen.variant,
                  selection.chosen_by]))
"""
    answer = run(code, target, HEEDFUL_ATTENTION_BACKEND="EXAMPLE_NAIVE")
    assert answer[0] == "EXAMPLE_NAIVE"
    assert answer[3:] == ["naive", "environment"]


def test_it_is_held_to_its_claims_like_any_other(target):
    code = """
from heedful import SelectionRequest, explain, forced_backend
with forced_backend("EXAMPLE_NAIVE"):
    refused = explain(SelectionRequest(64, dtype="float16", alibi=True))
print(json.dumps([refused.backend, [str(r.code) for r in refused.candidates[0].reasons]]))
"""
    assert run(code, target) == [None, ["DTYPE", "ALIBI"]]


def test_a_package_that_takes_a_built_in_name_is_an_error_that_names_both(target, tmp_path):
    changed = tmp_path / "source"
    shutil.copytree(SOURCE, changed)
    project = changed / "pyproject.toml"
    project.write_text(project.read_text().replace("EXAMPLE_NAIVE =", "TORCH_SDPA ="))
    install(changed, tmp_path / "site")
    code = """
from heedful import registry
from heedful.errors import BadInputError
try:
    registry.names()
except BadInputError as error:
    print(json.dumps([str(error), registry.load("TORCH_SDPA").__module__]))
"""
    message, module = run(code, tmp_path / "site")
    assert "'TORCH_SDPA': heedful_example.naive:EXAMPLE_NAIVE of heedful-example and the built-in" in message
    assert module == "heedful.backends.torch_sdpa"
    assert (
        run(
            "from heedful import registry\nprint(json.dumps(len(registry.names())))",
            tmp_path / "site",
            HEEDFUL_PLUGINS="off",
        )
        == 11
    )


def test_two_packages_with_one_name_are_an_error_that_names_both(target, tmp_path):
    changed = tmp_path / "source"
    shutil.copytree(SOURCE, changed)
    project = changed / "pyproject.toml"
    project.write_text(project.read_text().replace('name = "heedful-example"', 'name = "other-example"'))
    install(changed, tmp_path / "site")
    code = """
from heedful import registry
try:
    registry.names()
except ValueError as error:
    print(json.dumps(str(error)))
"""
    message = run(code, target, tmp_path / "site")
    assert "of heedful-example" in message
    assert "of other-example" in message


def test_a_package_that_breaks_costs_only_itself_and_repeats_its_first_cause(tmp_path):
    changed = tmp_path / "source"
    shutil.copytree(SOURCE, changed)
    (changed / "heedful_example" / "naive.py").write_text(
        "from . import child\nraise OSError('libvendor.so.3: gone')\n"
    )
    (changed / "heedful_example" / "child.py").write_text("")
    install(changed, tmp_path / "site")
    code = f"""
from heedful import explain, get_attn_backend, SelectionRequest
told = [[r.text for c in explain(SelectionRequest(64), override="EXAMPLE_NAIVE").candidates for r in c.reasons]
        for _ in range(3)]
left = [name for name in sys.modules if name.startswith("heedful_example")]
print(json.dumps([told, left, get_attn_backend({REQUEST}).name]))
"""
    told, left, other = run(code, tmp_path / "site")
    assert told == [["heedful_example.naive:EXAMPLE_NAIVE cannot be imported: OSError: libvendor.so.3: gone"]] * 3
    assert left == []
    assert other == "TORCH_SDPA"


def test_the_conformance_suite_proves_the_installed_backend(target):
    code = """
from heedful.conformance import run_conformance
results = list(run_conformance("EXAMPLE_NAIVE", profile="smoke", only=("*NAIVE/output*decode*",)))
print(json.dumps(sorted({str(result.outcome) for result in results})))
"""
    outcomes = run(code, target)
    assert "PASS" in outcomes
    assert set(outcomes) <= {"PASS", "NOT_SUPPORTED"}
