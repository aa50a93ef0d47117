import sys
import textwrap
from importlib.metadata import EntryPoint

import pytest

from heedful import libraries, registry
from heedful.backends.base import AttentionBackend
from heedful.errors import BackendUnavailableError, BadInputError
from heedful.types import Device, Missing, ReasonCode

NAMES = [
    "FLASH_ATTN",
    "XFORMERS",
    "ROCM_FLASH",
    "TORCH_SDPA",
    "OPENVINO",
    "IPEX",
    "FLASHINFER",
    "PALLAS",
    "NO_ATTENTION",
    "BLOCKSPARSE_FLASH_ATTN",
    "TRITON_ATTN",
]

PLUGIN = """
from heedful.backends.base import HndBackend
from heedful.backends.capabilities import Capability, Sizes

class Mine(HndBackend):
    name = "MINE"
    CAPABILITIES = (Capability("v", "cpu", frozenset({"bfloat16"}), Sizes(), Sizes()),)

    @staticmethod
    def get_impl_cls():
        return "built"
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes modules of an importable package that no one else has; what it left in sys.modules goes again."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, **modules):
        folder = tmp_path / name
        folder.mkdir()
        for module, text in ({"__init__": ""} | modules).items():
            (folder / f"{module}.py").write_text(textwrap.dedent(text))
        return name

    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def plugins(fresh, monkeypatch):
    """Puts entry points where an installed distribution would have them."""

    def register(*points):
        registry.forget()
        found = [EntryPoint(name, value, registry.GROUP) for name, value in points]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found if group == registry.GROUP else [])

    return register


def test_all_backends_are_registered_from_day_one(plugins):
    plugins()
    assert registry.names() == tuple(NAMES)


def test_the_table_of_built_ins_cannot_be_changed():
    with pytest.raises(TypeError):
        registry.BUILT_IN["FLASH_ATTN"] = registry.Entry("evil:Class")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_leads_to_the_class_of_that_name(name):
    backend = registry.load(name)
    assert issubclass(backend, AttentionBackend)
    assert backend.name == name
    assert registry.resolve(name) is backend is registry.resolve(registry.BUILT_IN[name].spec)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "NO_ATTENTION"])
def test_every_backend_that_needs_something_says_how_to_get_it(name):
    assert registry.install_hint(name).startswith("pip install")


@pytest.mark.parametrize(
    ("name", "near"),
    [("TORCH_SPDA", "TORCH_SDPA"), ("flash-attn", "FLASH_ATTN"), ("FLASH_ATTN ", "FLASH_ATTN"), ("", "")],
)
def test_an_unknown_name_is_told_with_all_names_and_the_near_miss(plugins, name, near):
    plugins()
    with pytest.raises(BadInputError) as caught:
        registry.load(name)
    hint = f"; did you mean '{near}'?" if near else ""
    assert str(caught.value) == f"backend {name!r} names no attention backend; the names are {', '.join(NAMES)}{hint}"


def test_a_third_partys_backend_is_listed_loaded_and_has_no_hint_here(plugins, package):
    plugins(("MINE", f"{package('thirdparty_a', good=PLUGIN)}.good:Mine"))
    assert registry.names() == (*NAMES, "MINE")
    assert "thirdparty_a.good" not in sys.modules
    assert registry.load("MINE").get_impl_cls() == "built"
    assert registry.install_hint("MINE") == ""


def test_a_built_in_name_cannot_be_shadowed(plugins):
    plugins(("FLASH_ATTN", "thirdparty:Flash"))
    told = "two backends claim the name 'FLASH_ATTN': thirdparty:Flash of an unnamed distribution and the built-in"
    for ask in (registry.names, lambda: registry.load("ANOTHER"), lambda: registry.check_name("FLASH_ATTN")):
        with pytest.raises(BadInputError, match=told):
            ask()
    assert registry.load("FLASH_ATTN").__module__ == "heedful.backends.flash_attn"


def test_a_name_claimed_twice_names_both(plugins):
    plugins(("MINE", "one:Mine"), ("MINE", "two:Mine"))
    with pytest.raises(BadInputError, match="one:Mine of an unnamed distribution and two:Mine of"):
        registry.names()


@pytest.mark.parametrize("word", ["0", "false", "No", "OFF"])
def test_third_parties_can_be_switched_off(plugins, monkeypatch, word):
    plugins(("FLASH_ATTN", "thirdparty:Flash"))
    monkeypatch.setenv("HEEDFUL_PLUGINS", word)
    assert registry.names() == tuple(NAMES)


@pytest.mark.parametrize("word", ["1", "true", "Yes", "on"])
def test_third_parties_can_be_switched_on(plugins, monkeypatch, word):
    plugins(("MINE", "one:Mine"))
    monkeypatch.setenv("HEEDFUL_PLUGINS", word)
    assert "MINE" in registry.names()


@pytest.mark.parametrize("word", ["maybe", "", "2", " on"])
def test_a_word_that_is_neither_yes_nor_no_is_an_error(plugins, monkeypatch, word):
    plugins()
    monkeypatch.setenv("HEEDFUL_PLUGINS", word)
    with pytest.raises(BadInputError, match=f"HEEDFUL_PLUGINS={word!r} is neither yes nor no"):
        registry.names()


BROKEN = {
    "is 3, not a subclass": "Mine = 3",
    "not a subclass of heedful.AttentionBackend": "class Mine: pass",
    "has no attribute 'Mine'": "Other = 3",
    "ImportError: libgone.so: cannot open": "raise ImportError('libgone.so: cannot open')",
    "OSError: undefined symbol": "raise OSError('undefined symbol')",
    "RuntimeError: driver too old": "raise RuntimeError('driver too old')",
    "AttributeError: partially": "raise AttributeError('partially initialized')",
    "SyntaxError": "def",
    "leaves members of AttentionBackend open: copy_blocks": (
        "from heedful.backends.base import AttentionBackend\nclass Mine(AttentionBackend): pass"
    ),
    "has no CAPABILITIES": PLUGIN.replace("    CAPABILITIES", "    _CAPABILITIES"),
    "calls itself 'OTHER'": PLUGIN.replace('"MINE"', '"OTHER"'),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_plugin_costs_only_itself_and_repeats_its_first_cause(plugins, package, message):
    name = package("thirdparty_b", bad=BROKEN[message])
    plugins(("MINE", f"{name}.bad:Mine"))
    told = set()
    for _ in range(3):
        with pytest.raises(BackendUnavailableError) as caught:
            registry.load("MINE")
        told.add(str(caught.value))
    assert len(told) == 1
    assert message in told.pop()
    assert registry.load("TORCH_SDPA").name == "TORCH_SDPA"


def test_a_spec_of_module_and_class_is_resolved_without_registration(fresh, package):
    name = package("thirdparty_c", good=PLUGIN)
    assert registry.resolve(f"{name}.good:Mine").name == "MINE"
    with pytest.raises(BackendUnavailableError, match="No module named 'nowhere_at_all'"):
        registry.resolve("nowhere_at_all:Mine")


HALF = {
    "__init__": "from . import child\nfrom . import late\n",
    "child": "value = 1\n",
    "late": "raise ImportError('flash_2_cuda.so: undefined symbol: _ZN3c10')\n",
}


def test_a_package_that_fails_late_is_unavailable_with_its_first_cause_and_leaves_nothing_behind(fresh, package):
    name = package("half_a", **HALF)
    first = libraries.installed(name)
    assert first == Missing(ReasonCode.IMPORT_FAILED, "ImportError: flash_2_cuda.so: undefined symbol: _ZN3c10")
    assert not [module for module in sys.modules if module.startswith(name)]
    assert libraries.installed(name) is first


def test_the_first_cause_is_repeated_even_after_the_library_was_mended(fresh, package, tmp_path):
    name = package("half_b", **HALF)
    first = libraries.installed(name)
    (tmp_path / name / "late.py").write_text("")
    assert libraries.installed(name) is first
    libraries.forget()
    assert libraries.installed(name) == "of unknown version"


def test_what_was_imported_before_the_failure_by_others_stays(fresh, package):
    package("half_c", __init__="", good="")
    import half_c.good

    package("half_d", __init__="import half_c.good\nraise OSError('no')\n")
    assert libraries.installed("half_d").cause == "OSError: no"
    assert sys.modules["half_c.good"] is half_c.good


@pytest.mark.parametrize(
    ("name", "body", "code"),
    [
        ("nowhere_at_all", None, ReasonCode.NOT_INSTALLED),
        ("nowhere_at_all.child", None, ReasonCode.NOT_INSTALLED),
        ("half_e", "import nowhere_at_all", ReasonCode.IMPORT_FAILED),
        ("half_e", "raise OSError('libcuda.so.1')", ReasonCode.IMPORT_FAILED),
        ("half_e", "raise ValueError('key contains names')", ReasonCode.IMPORT_FAILED),
    ],
)
def test_a_library_that_is_not_there_differs_from_one_that_breaks(fresh, package, name, body, code):
    if body is not None:
        package(name, __init__=body)
    assert libraries.installed(name).code == code


def test_a_cause_is_told_with_what_it_came_from(fresh, package):
    body = "try:\n    raise OSError('libx.so')\nexcept OSError as e:\n    raise ImportError('no x') from e\n"
    package("half_f", __init__=body)
    assert libraries.installed("half_f").cause == "ImportError: no x (from OSError: libx.so)"


def test_files_shared_with_another_distribution_do_not_count_as_installed(fresh):
    fact = libraries.installed("flash_attn.cute")
    assert fact == Missing(ReasonCode.NOT_INSTALLED, "the distribution flash-attn-4 is not installed")
    assert "flash_attn" not in sys.modules


def test_a_librarys_version_comes_from_its_distribution(fresh):
    from importlib.metadata import version

    assert libraries.installed("pytest") == version("pytest")


def test_the_table_of_libraries_is_sorted_and_says_why_one_is_in_no_stack():
    assert list(libraries.LIBRARIES) == sorted(libraries.LIBRARIES)
    assert all(bool(library.pins) != bool(library.unpinned) for library in libraries.LIBRARIES.values())


def test_every_library_that_a_backend_needs_is_in_the_table():
    for name in NAMES:
        backend = registry.load(name)
        needed = {*backend.LIBRARIES, *(library for row in backend.CAPABILITIES for library in row.libraries)}
        assert needed <= set(libraries.LIBRARIES), name


def test_the_pinned_stack_of_a_platform_serves_each_of_its_backends():
    for name in NAMES:
        backend = registry.load(name)
        for platform in {row.platform for row in backend.CAPABILITIES}:
            rows = [row for row in backend.CAPABILITIES if row.platform == platform]
            whole = [
                row
                for row in rows
                if all(isinstance(libraries.pinned(x, platform), str) for x in (*backend.LIBRARIES, *row.libraries))
            ]
            assert whole, (name, platform)


def test_simulated_devices_assume_the_pinned_stack_and_every_kernel(plugins):
    plugins()
    facts = registry.package_facts(Device("cuda", capability=(9, 0)))
    assert facts["flashinfer"] == "0.7.2"
    assert facts["heedful:FLASH_ATTN"] == "assumed"
    assert facts["a_third_partys_library"] == "assumed"
    assert facts["jax"].code == ReasonCode.NOT_INSTALLED
    assert "not in the pinned stack of cuda: it shares files with flash-attn" in facts["flash_attn.cute"].cause


def test_real_facts_tell_which_code_is_not_part_of_this_release(plugins):
    plugins()
    facts = registry.package_facts(Device("cuda", capability=(9, 0), simulated=False))
    assert facts["heedful:TORCH_SDPA"] == registry.BUILT
    for name in NAMES:
        unbuilt = isinstance(facts[f"heedful:{name}"], Missing)
        if unbuilt:
            assert facts[f"heedful:{name}"].code == ReasonCode.NOT_BUILT
            with pytest.raises(BackendUnavailableError, match=f"{name} cannot be built: its claims are part"):
                registry.load(name).get_impl_cls()


def test_facts_can_be_listed_and_asked_for_without_an_import(plugins):
    plugins()
    facts = registry.package_facts(Device("cpu", simulated=False))
    before = set(sys.modules)
    assert set(libraries.LIBRARIES) | {f"heedful:{name}" for name in NAMES} == set(facts)
    assert len(facts) == len(list(facts))
    assert "xformers" in facts
    assert "heedful:TORCH_SDPA" in facts
    assert "heedful:NONE" not in facts
    assert not {"torch", "xformers", "jax"} & (set(sys.modules) - before)
    with pytest.raises(KeyError):
        facts["heedful:NONE"]
