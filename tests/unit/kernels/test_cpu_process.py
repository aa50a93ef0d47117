"""The kernels as guests of a process: memory, forks, threads that cannot be had, the variables that steer them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_problem import BEST_FIRST, Problem, kernels

from heedful.errors import BadInputError
from heedful.kernels.cpu import library

ROOT = Path(__file__).resolve().parents[3]


def run(code, *first, **environment):
    """A new process with the folders `first` and this one importable: what it printed."""
    paths = os.pathsep.join([*map(str, first), str(Path(__file__).parent), *filter(None, sys.path)])
    settings = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


GROWTH = """
import resource, torch
from cpu_problem import Problem, kernels
torch.set_num_threads(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def attend(q_len, context):
    one = Problem(lens=((q_len, 16 - q_len % 16),), heads=4, kv_heads=2, size=64, block=16, dtype=torch.{dtype})
    call, output, lse = one.call(threads=2)
    table = torch.zeros(context // 16, dtype=torch.int32)  # one page, over and over
    table[:] = one.tables[0, 0]
    lens = torch.tensor([context], dtype=torch.int32)
    call.block_tables, call.kv_lens = table.data_ptr(), lens.data_ptr()
    kernels.attend(call)
    assert not output.isnan().any()
for q_len in (1, 3, 100):
    attend(q_len, 1024)
    attend(q_len, 16384)  # as many parts as there are: from here on they get longer
before = peak()
for q_len in (1, 3, 100):
    attend(q_len, 65536)
print(peak() - before)
"""


@pytest.mark.parametrize("isa", BEST_FIRST[:1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_does_not_grow_with_the_context(isa, dtype):
    """K and V of 64k keys would be 64 MiB in fp32; packed panels and parts are all that is kept."""
    grown = int(run(GROWTH.replace("{dtype}", dtype), HEEDFUL_CPU_ISA=isa))
    assert grown < 1024, f"{grown} KiB more for 64k keys than for 16k"


FORK = """
import os, torch
from cpu_problem import Problem, same
torch.set_num_threads(1)
mixed = Problem(size=32)
right = mixed.run("{isa}", threads=3)
child = os.fork()
if not child:
    os._exit(0 if all(same(mixed.run("{isa}", threads=t), right) for t in (3, 2)) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert same(mixed.run("{isa}", threads=3), right)
print("both")
"""


def test_a_forked_child_starts_a_pool_of_its_own():
    assert run(FORK.replace("{isa}", BEST_FIRST[0])) == "both\n"


NO_THREADS = """
import resource, torch
from cpu_problem import Problem, same
mixed = Problem(size=32)
right = mixed.run("{isa}")
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, ((used + 4096) * 1024,) * 2)  # less than one thread's stack
assert same(mixed.run("{isa}", threads=4), right)
print("alone")
"""


def test_where_no_thread_can_be_started_the_caller_does_the_work():
    assert run(NO_THREADS.replace("{isa}", BEST_FIRST[0])) == "alone\n"


GUARD = """
import ctypes, itertools, mmap, torch
from cpu_problem import BF16, E4M3, F16, F32, Problem, kernels, using
libc, held = ctypes.CDLL(None), []

def guarded(x):
    # a copy whose last byte is the last before a page that may not be touched
    size = x.numel() * x.element_size()
    end = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    held.append(mmap.mmap(-1, end + mmap.PAGESIZE))
    memory = torch.frombuffer(held[-1], dtype=torch.uint8)
    assert libc.mprotect(ctypes.c_void_p(memory.data_ptr() + end), mmap.PAGESIZE, 0) == 0
    copy = memory[end - size : end].view(x.dtype).view(x.shape)
    copy.copy_(x)
    return copy
"""

GUARDED = """
counts, floors = (1, 2, 3, 5, 6, 7, 62, 63, 66), 3 if "amx" in {isas} else 2
for isa, types, count, size in itertools.product({isas}, [(F32, None), (BF16, None), (BF16, E4M3)], counts, (24, 72)):
    lens = ((1, count - 1),) if count < 8 else ((1, count - 1), (count, 0))
    one = Problem(lens=lens, dtype=types[0], cache=types[1], size=size, heads=2, kv_heads=1, rules=dict(causal=False))
    if types[1] is None:
        call, output, lse = one.call(query=guarded(one.query))
        one.flatten(call, guarded(torch.cat(one.keys)), guarded(torch.cat(one.values)))
        with using(isa):
            kernels.attend(call)
        one.check((output, lse), one.expected(), floors)
    one.check(one.run(isa, sides=[guarded(one.key_pages), guarded(one.value_pages)]), one.expected(), floors)
print("untouched")
"""


@pytest.mark.parametrize("isa", [*BEST_FIRST, "naive"])
def test_nothing_is_read_past_the_end_of_a_tensor(isa):
    """The process would die of it. The address sanitizer, scripts/sanitize, sees more, but not in every commit."""
    assert run(GUARD + GUARDED.replace("{isas}", repr([isa]))) == "untouched\n"


GUARDED_STATES = """
for size, dtype, count in itertools.product((1, 3, 16, 24, 72, 130), (F32, BF16, F16), (1, 2, 5)):
    for tokens, heads in ((1, 1), (3, 5), (17, 1)):
        outputs = [guarded(torch.randn(tokens, heads, size).to(dtype)) for _ in range(count)]
        lses = [guarded(torch.randn(tokens, heads)) for _ in range(count)]
        whole = dict(output=guarded(outputs[0]), output_lse=guarded(lses[0]))
        with using("{isa}"):
            found = kernels.merge_states(outputs, lses, **whole)
        assert not found[0].isnan().any()
        held.clear()
print("untouched")
"""


@pytest.mark.parametrize("isa", [*BEST_FIRST, "naive"])
def test_a_merge_reads_and_writes_nothing_past_the_end_of_a_tensor(isa):
    assert run(GUARD + GUARDED_STATES.replace("{isa}", isa)) == "untouched\n"


GUARDED_BLOCKS = """
from heedful.backends.torch_sdpa import TorchSdpaBackend
for size, blocks in ((5, 3), (64, 3), (64, 1100)):  # the last is long enough to be written past the caches
    cache = guarded(torch.randn(2, blocks, 2, 16, size))
    other = tuple(guarded(torch.randn(blocks, 2, 16, size)) for _ in range(2))
    last = torch.tensor([[i, blocks - 1 - i] for i in range(blocks)])
    TorchSdpaBackend.copy_blocks([cache], torch.tensor([[blocks - 1, 0]]))
    TorchSdpaBackend.swap_blocks(cache, other, last)
    TorchSdpaBackend.swap_blocks(other, cache, last)
    held.clear()
print("untouched")
"""


@pytest.mark.parametrize("isa", [BEST_FIRST[0], "naive"])
def test_a_block_copy_reads_and_writes_nothing_past_the_end_of_a_cache(isa):
    assert run(GUARD + GUARDED_BLOCKS, HEEDFUL_CPU_ISA=isa) == "untouched\n"


def test_the_first_instruction_set_that_the_machine_has_is_chosen(monkeypatch):
    monkeypatch.delenv("HEEDFUL_CPU_ISA", raising=False)
    assert kernels.chosen_isa() == BEST_FIRST[0]
    assert "portable" in BEST_FIRST


@pytest.mark.parametrize("isa", [*BEST_FIRST, "naive"])
def test_the_variable_chooses_another(isa, monkeypatch):
    monkeypatch.setenv("HEEDFUL_CPU_ISA", isa)
    assert kernels.chosen_isa() == isa


def test_a_wrong_instruction_set_is_one_error_with_the_nearest_name(monkeypatch):
    monkeypatch.setenv("HEEDFUL_CPU_ISA", "portible")
    with pytest.raises(BadInputError, match=r"HEEDFUL_CPU_ISA='portible' names no .*naive.*portable") as caught:
        kernels.attend(Problem(size=16).call()[0])
    assert "\n" not in str(caught.value)


def test_an_instruction_set_that_the_machine_lacks_is_an_error_that_lists_what_it_has(monkeypatch):
    monkeypatch.setattr(library, "isas", lambda: {"avx10": False, "portable": True})
    library._checked.cache_clear()
    monkeypatch.setenv("HEEDFUL_CPU_ISA", "avx10")
    with pytest.raises(BadInputError, match="'avx10', but this machine lacks it; it has portable"):
        kernels.chosen_isa()
    library._checked.cache_clear()


def test_the_kernels_load_no_torch():
    code = "import sys, heedful.kernels.cpu as k; assert 'torch' not in sys.modules; print(len(k.isas()) > 0)"
    assert run(code) == "True\n"


def test_another_build_can_be_named(tmp_path):
    copy = tmp_path / "other.so"
    shutil.copy(library._path(), copy)
    code = "from heedful.kernels.cpu import library; print(library._LIBRARY._name)"
    assert run(code, HEEDFUL_CPU_LIBRARY=str(copy)) == f"{copy}\n"


SELECTED = """
from heedful.selector import explain
from heedful.types import SelectionRequest
found = explain(SelectionRequest(head_size=64))
print(found.backend, found.chosen.variant)
print(found)
"""


def test_a_library_that_is_not_there_leaves_torch_and_the_record_says_why(tmp_path):
    gone = str(tmp_path / "gone.so")
    chosen, record = run(SELECTED, HEEDFUL_CPU_LIBRARY=gone, HEEDFUL_PLATFORM="cpu").split("\n", 1)
    assert chosen == "TORCH_SDPA torch"
    assert f"HEEDFUL_CPU_LIBRARY='{gone}' names no file" in "".join(record.split("\n"))


ATTENDED = """
import torch
from heedful.backends.torch_sdpa import TorchSdpaBackend
impl = TorchSdpaBackend.get_impl_cls()(2, 16, 0.25)
print(impl.kernels)
"""


def test_a_layer_runs_on_torch_where_the_library_is_not_there(tmp_path):
    assert run(ATTENDED, HEEDFUL_CPU_LIBRARY=str(tmp_path / "gone.so")) == "None\n"


COPIED = """
import torch
from heedful.backends import torch_sdpa_blocks
from heedful.backends.torch_sdpa import TorchSdpaBackend
cache = torch.randn(2, 4, 2, 4, 8)
TorchSdpaBackend.copy_blocks([cache], torch.tensor([[0, 3]]))
TorchSdpaBackend.swap_blocks(cache, cache, torch.tensor([[1, 2]]))
assert torch.equal(cache[:, 3], cache[:, 0]) and torch.equal(cache[:, 2], cache[:, 1])
print(torch_sdpa_blocks.kernels)
"""


def test_blocks_are_copied_by_torch_where_the_library_is_not_there(tmp_path):
    assert run(COPIED, HEEDFUL_CPU_LIBRARY=str(tmp_path / "gone.so")) == "None\n"


@pytest.mark.parametrize("what", ["text", "another library"])
def test_a_file_that_is_no_library_of_this_release_counts_as_none_and_the_record_says_why(tmp_path, what):
    path = tmp_path / "other.so"
    if what == "text":
        path.write_text("not a library")
    else:
        other = tmp_path / "other.c"
        other.write_text("int heedful_attend(void) { return 0; }")
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler to build another library with")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(other)], check=True)
    assert run(ATTENDED, HEEDFUL_CPU_LIBRARY=str(path)) == "None\n"
    chosen, record = run(SELECTED, HEEDFUL_CPU_LIBRARY=str(path), HEEDFUL_PLATFORM="cpu").split("\n", 1)
    assert chosen == "TORCH_SDPA torch"
    assert f"{path} is no library of this release" in "".join(record.split("\n"))


def test_simulated_facts_choose_the_variant():
    from heedful.selector import explain
    from heedful.types import Device, Missing, ReasonCode, SelectionRequest

    request, device = SelectionRequest(head_size=64), Device("cpu")
    torch_only = {
        "torch": "2.13.0",
        "heedful:TORCH_SDPA": "built",
        "heedful.kernels.cpu": Missing(ReasonCode.NOT_INSTALLED, "it was not built"),
    }
    assert explain(request, device, packages=torch_only | {"heedful.kernels.cpu": "1"}).chosen.variant == "cpp"
    found = explain(request, device, packages=torch_only)
    assert found.chosen.variant == "torch"
    assert "it was not built" in str(found)


@pytest.mark.nightly
def test_without_a_compiler_the_package_still_installs(tmp_path, monkeypatch):
    """Installed where CMake finds no compiler: a wheel without the library, and a selection that says so."""
    settings = os.environ | {"CXX": "/nonexistent", "CMAKE_ARGS": "-DCMAKE_CXX_COMPILER=/nonexistent"}
    settings.pop("HEEDFUL_CPU_LIBRARY", None)
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.so", "reports"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source]
    subprocess.run(command, env=settings, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("heedful-*.whl")
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel], check=True
    )
    assert list(target.rglob("*.so")) == []
    monkeypatch.delenv("HEEDFUL_CPU_LIBRARY", raising=False)
    chosen, record = run(SELECTED, target, HEEDFUL_PLATFORM="cpu").split("\n", 1)
    assert chosen == "TORCH_SDPA torch"
    assert "libheedful_cpu.so was not built" in record
