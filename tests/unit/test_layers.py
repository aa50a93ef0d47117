"""Who may import whom, read from the sources and checked again in new processes."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import heedful

ROOT = Path(heedful.__file__).parent
BACKENDS_SHARED = {"base", "builds", "capabilities", "claimed"}


def modules():
    """Dotted name -> file, for every module of the package."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("heedful", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path, *, at_load_only=False):
    """The heedful modules that a file imports; those under TYPE_CHECKING never, those inside functions if asked."""
    found = set()

    def visit(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if at_load_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            if isinstance(child, ast.ImportFrom) and child.module:
                found.add(child.module)
                found.update(f"{child.module}.{alias.name}" for alias in child.names)
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def own(path, **kinds):
    return {name for name in imports(path, **kinds) if name in MODULES and name != "heedful"}


def under(*prefixes):
    return sorted(n for n in MODULES if any(n == prefix or n.startswith(f"{prefix}.") for prefix in prefixes))


def starts(name, *prefixes):
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def test_errors_import_nothing_and_types_import_errors_alone():
    assert own(MODULES["heedful.errors"]) == set()
    assert own(MODULES["heedful.types"]) == {"heedful.errors"}


@pytest.mark.parametrize("name", ["environment", "libraries", "nvml", "probes", "platforms", "vllm_063"])
def test_the_base_of_selection_knows_no_backend(name):
    allowed = ("heedful.errors", "heedful.types", "heedful.environment", "heedful.libraries", "heedful.nvml")
    allowed += ("heedful.probes",)
    assert all(starts(found, *allowed) for found in own(MODULES[f"heedful.{name}"]))


def backend_modules():
    return [name for name in under("heedful.backends") if name != "heedful.backends"]


def registered():
    """Module of each registered backend's class, without loading it."""
    from heedful.registry import BUILT_IN

    return {entry.spec.partition(":")[0]: name for name, entry in BUILT_IN.items()}


def family_of(module):
    """The registered backend that a file belongs to: torch_sdpa_plan stands behind torch_sdpa; None for shared code."""
    stems = sorted((name for name in registered()), key=len, reverse=True)
    return next((stem for stem in stems if module == stem or module.startswith(f"{stem}_")), None)


@pytest.mark.parametrize("name", backend_modules())
def test_a_backend_imports_no_other_backend_nor_registry_nor_reference(name):
    for found in own(MODULES[name]):
        if found.startswith("heedful.backends."):
            assert family_of(found) in (None, family_of(name)), f"{name} imports {found}"
        else:
            above = ("registry", "selector", "reference", "conformance", "runner", "harness", "report", "cli")
            assert not starts(found, *(f"heedful.{one}" for one in above)), f"{name} imports {found}"


def test_a_kernel_knows_no_backend():
    for name in under("heedful.kernels"):
        assert not any(starts(found, "heedful.backends", "heedful.selector") for found in own(MODULES[name])), name


@pytest.mark.parametrize("name", [n for n in MODULES if n == "heedful.reference" or n.startswith("heedful.reference")])
def test_the_reference_shares_nothing_with_what_it_judges(name):
    for found in own(MODULES[name]):
        assert starts(found, "heedful.errors", "heedful.types", "heedful.reference"), f"{name} imports {found}"


@pytest.mark.parametrize("name", under("heedful.registry", "heedful.selector"))
def test_registry_and_selector_stand_below_everything_that_uses_them(name):
    above = ("reference", "runner", "conformance", "harness", "report", "cli", "kernels")
    assert not any(starts(found, *(f"heedful.{one}" for one in above)) for found in own(MODULES[name]))


@pytest.mark.parametrize("name", under("heedful.report"))
def test_reports_stand_below_the_harness_and_the_command_line(name):
    above = ("heedful.harness", "heedful.cli", "heedful.runner", "heedful.reference")
    assert not any(starts(found, *above) for found in own(MODULES[name]))


@pytest.mark.parametrize("name", under("heedful.conformance", "heedful.runner", "heedful.harness"))
def test_only_the_command_line_stands_above_the_suite(name):
    assert not any(starts(found, "heedful.cli") for found in own(MODULES[name]))


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("heedful.cli")])
def test_only_the_command_line_prints_reads_arguments_or_exits(name):
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        called = node.func if isinstance(node, ast.Call) else None
        assert not (isinstance(called, ast.Name) and called.id in ("print", "input", "exit")), name
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sys":
            assert node.attr not in ("argv", "exit"), name


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_says_what_it_is_for(name):
    assert ast.get_docstring(ast.parse(MODULES[name].read_text())), f"{name} has no docstring"


TORCH_FREE = [
    name
    for name in MODULES
    if starts(name, "heedful.report", "heedful.harness", "heedful.cli")
    or name in {f"heedful.conformance.{one}" for one in ("cases", "plan", "results", "pytest_plugin")}
    or name in registered()
    or (name.count(".") == 1 and name not in ("heedful.reference", "heedful.runner"))
    or name in {f"heedful.backends.{one}" for one in BACKENDS_SHARED}
]


def loaded_by(names):
    """For each module imported in a new process, one after another: which heavy libraries are there afterwards."""
    code = f"""
import sys, json
from importlib import import_module
heavy, found = {{"torch", "numpy", "triton", "jax", "transformers", "openvino"}}, {{}}
for name in {names!r}:
    import_module(name)
    if heavy & set(sys.modules):
        found[name] = sorted(heavy & set(sys.modules))
        break
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_never_loads_torch_does_not_in_a_new_process():
    assert loaded_by(sorted(TORCH_FREE)) == {}


def test_reading_every_backends_claims_loads_no_library():
    code = """
import sys, json
from heedful import registry
for name in registry.BUILT_IN:
    registry.load(name).CAPABILITIES
print(json.dumps(sorted({"torch", "numpy", "triton", "jax", "openvino"} & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_no_module_imports_an_optional_library_when_it_is_loaded_unless_it_runs_on_it():
    optional = {"triton", "flash_attn", "xformers", "flashinfer", "aiter", "jax", "openvino", "libtpu"}
    for name, path in MODULES.items():
        roots = {found.partition(".")[0] for found in imports(path, at_load_only=True)}
        behind_an_impl = family_of(name) is not None and name not in registered()
        if not behind_an_impl and not starts(name, "heedful.kernels"):
            assert not roots & optional, name


def test_the_walk_really_sees_the_package():
    assert len(MODULES) > 20
    assert {"heedful.selector", "heedful.backends.flash_attn", "heedful.conformance.plan"} <= set(MODULES)
    assert own(MODULES["heedful.selector"]) >= {"heedful.registry", "heedful.platforms", "heedful.types"}
