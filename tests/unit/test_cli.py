"""The command line: what it prints, what it refuses and with which exit code. conform has a file of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from heedful import registry
from heedful.cli import main
from heedful.cli.app import app
from heedful.cli.output import write_file
from heedful.errors import ReportError
from heedful.types import PLATFORMS

EXIT_BAD_INPUT, EXIT_SELECTION, EXIT_REPORT, EXIT_UNAVAILABLE = 2, 4, 7, 9


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("HEEDFUL_", "VLLM_"))]:
        monkeypatch.delenv(name)


def shell(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a shell starts it: a process of its own."""
    command = [sys.executable, "-c", "import sys; from heedful.cli import main; sys.exit(main())", *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


def test_version_is_one_line(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("heedful 0.")


def test_help_names_every_subcommand(capsys):
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in ("select", "backends", "doctor", "conform", "report", "generate"))


def test_without_a_subcommand_the_help_is_shown(capsys):
    main([])
    assert "Usage: heedful" in capsys.readouterr().out


# -- select ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", PLATFORMS)
def test_select_answers_for_every_platform_on_this_machine(platform, capsys):
    assert main(["select", "--platform", platform, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["device"].startswith(platform)
    assert record["backend"] in registry.names()
    others = [c for c in record["candidates"] if c["backend"] != record["backend"]]
    assert all(candidate["reasons"] for candidate in others)


def test_select_shows_every_candidate_with_all_its_reasons(capsys):
    assert main(["select", "--platform", "cuda", "--capability", "9.0"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("FLASHINFER on cuda 9.0, chosen by preference (policy strict)  [simulated device]")
    assert all(name in told for name in ("FLASH_ATTN", "XFORMERS", "TRITON_ATTN", "BLOCK_SIZE", "POLICY"))


@pytest.mark.parametrize(
    ("words", "device"),
    [
        (["--platform", "cuda", "--capability", "8.6"], "cuda 8.6"),
        (["--capability", "7.5"], "cuda 7.5"),
        (["--arch", "gfx942"], "rocm gfx942"),
        (["--platform", "tpu", "--arch", "v6e"], "tpu v6e"),
    ],
)
def test_select_simulates_the_device_that_the_options_name(words, device, capsys):
    main(["select", *words, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert (record["device"], record["simulated"]) == (device, True)


def test_select_passes_every_field_of_a_request_on(capsys):
    words = "--head-size 64 --sliding-window 128 --dtype float16 --kv-cache-dtype fp8 --block-size 32 --num-heads 8"
    more = "--num-kv-heads 2 --head-size-v 48 --attn-type decoder --alibi --logits-soft-cap 30 --sinks --platform cpu"
    main(["select", *words.split(), *more.split(), "--json"])
    assert json.loads(capsys.readouterr().out)["request"] == {
        "head_size": 64,
        "sliding_window": 128,
        "dtype": "float16",
        "kv_cache_dtype": "fp8",
        "block_size": 32,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size_v": 48,
        "alibi": True,
        "logits_soft_cap": 30.0,
        "sinks": True,
    }


@pytest.mark.parametrize(("flag", "backend"), [("--attention-free", "NO_ATTENTION"), ("--blocksparse", None)])
def test_select_takes_the_flags_of_special_models(flag, backend, capsys):
    code = main(["select", "--platform", "cpu", flag, "--json"])
    assert json.loads(capsys.readouterr().out)["backend"] == backend
    assert code == (0 if backend else EXIT_SELECTION)


def test_select_fails_with_the_selections_code_after_it_has_told_the_reasons(capsys):
    assert main(["select", "--platform", "cuda", "--capability", "3.0"]) == EXIT_SELECTION
    told = capsys.readouterr()
    assert "fa2 has no kernel for cuda 3.0" in told.out
    assert told.err.startswith("heedful: no backend can serve this request on cuda 3.0")
    assert len(told.err.splitlines()) == 1


def test_an_explicit_backend_is_validated_and_never_replaced(capsys):
    assert main(["select", "--platform", "cpu", "--backend", "FLASH_ATTN", "--json"]) == EXIT_SELECTION
    record = json.loads(capsys.readouterr().out)
    assert record["backend"] is None
    assert record["candidates"][0]["reasons"][0]["code"] == "PLATFORM"


def test_select_takes_the_migration_policy(capsys):
    assert main(["select", "--platform", "cpu", "--policy", "vllm-0.6.3", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["policy"], record["backend"]) == ("vllm-0.6.3", "TORCH_SDPA")


BAD_SELECTIONS = {
    "an unknown option": ("--hed-size 64", "No such option: --hed-size"),
    "a word for a number": ("--head-size wide", "--head-size"),
    "an unknown platform": ("--platform cudda", "did you mean 'cuda'"),
    "an unknown dtype": ("--dtype float15", "unknown dtype 'float15'"),
    "an unknown cache dtype": ("--kv-cache-dtype fp9", "unknown kv_cache_dtype 'fp9'"),
    "an unknown attention type": ("--attn-type sideways", "unknown attn_type 'sideways'"),
    "an unknown policy": ("--policy lenient", "lenient"),
    "an unknown backend": ("--backend TORCH_SDAP", "did you mean 'TORCH_SDPA'"),
    "heads that KV heads do not divide": ("--num-heads 5 --num-kv-heads 2", "not a multiple of num_kv_heads 2"),
    "a soft cap that is no number": ("--logits-soft-cap nan", "logits_soft_cap nan must be positive and finite"),
    "a window that shows no key": ("--sliding-window 0", "sliding_window 0 shows no key"),
    "a head size of nothing": ("--head-size 0", "head_size 0 must be 1 or more"),
    "a capability without a minor": ("--platform cuda --capability 9", "write major.minor, such as 9.0"),
    "an architecture without a platform": ("--arch v5e", "add --platform"),
    "a stray word": ("FLASH_ATTN", "unexpected extra argument"),
}


@pytest.mark.parametrize(("words", "told"), BAD_SELECTIONS.values(), ids=BAD_SELECTIONS)
def test_bad_input_is_one_message_and_exit_code_2(words, told, capsys):
    assert main(["select", *words.split()]) == EXIT_BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("heedful: ")
    assert told in captured.err
    assert "Traceback" not in captured.err


def test_debug_adds_the_traceback_and_keeps_the_code(capsys):
    assert main(["--debug", "select", "--dtype", "float15"]) == EXIT_BAD_INPUT
    assert "Traceback" in capsys.readouterr().err


# -- backends and doctor -----------------------------------------------------------------------------------------------


def test_backends_lists_all_with_the_first_cause_of_absence(capsys):
    assert main(["backends", "--platform", "cpu", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["backends"]}
    assert tuple(rows) == registry.names()
    assert rows["TORCH_SDPA"]["available"]
    assert "torch" in rows["TORCH_SDPA"]["versions"]
    assert rows["FLASH_ATTN"]["cause"] == "runs on cuda, not on cpu"
    assert all(row["available"] != bool(row["cause"]) for row in rows.values())
    assert all(row["capabilities"] for row in rows.values())


def test_backends_shows_the_claims_of_one(capsys):
    assert main(["backends", "TORCH_SDPA"]) == 0
    told = capsys.readouterr().out
    assert "TORCH_SDPA" in told
    assert "encoder_decoder" in told
    assert "FLASH_ATTN" not in told


def test_backends_refuses_an_unknown_name(capsys):
    assert main(["backends", "FLASH_ATN"]) == EXIT_BAD_INPUT
    assert "did you mean 'FLASH_ATTN'" in capsys.readouterr().err


def test_doctor_tells_device_libraries_and_backends(capsys):
    assert main(["doctor", "--platform", "cpu", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["device"]["platform"] == "cpu"
    assert set(record["probes"]) == set(PLATFORMS)
    assert record["packages"]["torch"]
    assert {"TORCH_SDPA", "NO_ATTENTION"} <= {one["name"] for one in record["backends"] if one["available"]}


def test_doctor_fails_where_no_attention_backend_can_be_loaded(capsys):
    assert main(["doctor", "--platform", "rocm"]) == EXIT_UNAVAILABLE
    told = capsys.readouterr()
    assert "missing  ROCM_FLASH" in told.out
    assert "no attention backend can be loaded on rocm" in told.err


# -- report and generate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["", "{", '{"kind": "something else"}', "\x00\xff"], ids=["empty", "cut", "foreign", "noise"]
)
def test_an_unreadable_report_is_one_message(content, tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text(content, encoding="latin-1")
    assert main(["report", str(path)]) == EXIT_REPORT
    assert str(path) in capsys.readouterr().err


def test_an_absent_report_is_one_message(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none.json")]) == EXIT_REPORT
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens 0 must be 1 or more"),
        (["--prompt", "x", "--temperature", "nan"], "temperature nan must be finite"),
        (["--prompt", "x", "--dtype", "float15"], "unknown dtype"),
        ([], "--prompt"),
    ],
)
def test_generate_refuses_bad_input_before_it_loads_a_model(words, told, capsys):
    assert main(["generate", *words]) == EXIT_BAD_INPUT
    assert told in capsys.readouterr().err


def test_generate_names_a_model_that_is_not_there(tmp_path, capsys):
    assert main(["generate", "--prompt", "x", "--model", str(tmp_path / "none.gguf")]) == 11
    assert "no weights at" in capsys.readouterr().err


# -- the process -------------------------------------------------------------------------------------------------------


def test_help_loads_neither_torch_nor_a_backend():
    code = "import sys; from heedful.cli import main; main(['--help']); print(sorted(m for m in sys.modules if m in "
    told = subprocess.run(
        [sys.executable, "-c", code + "('torch', 'numpy', 'heedful.selector', 'heedful.backends.torch_sdpa')))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_ends_the_command_quietly():
    command = [sys.executable, "-c", "import sys; from heedful.cli import main; sys.exit(main())", "select", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("heedful.platforms.device_for", interrupted)
    assert main(["select"]) == 130
    assert capsys.readouterr().err.strip() == "heedful: interrupted"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("heedful select --backend TORCH", {"TORCH_SDPA"}),
        ("heedful backends FLASH", {"FLASH_ATTN", "FLASHINFER"}),
        ("heedful select --platform o", {"openvino"}),
        ("heedful conform --profile ", {"smoke", "ci", "full"}),
        ("heedful con", {"conform"}),
    ],
)
def test_the_shell_completes_names(line, offered):
    words = line.split() + ([""] if line.endswith(" ") else [])
    answer = shell(
        _HEEDFUL_COMPLETE="complete_bash",
        COMP_WORDS=line,
        COMP_CWORD=str(len(words) - 1),
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1",
    )
    assert set(answer.stdout.split()) == offered, answer.stderr


def test_every_option_has_help():
    import typer

    group = typer.main.get_command(app)
    silent = [
        f"{name} {param.name}"
        for name, command in group.commands.items()
        for param in command.params
        if not getattr(param, "help", None)
    ]
    assert silent == []


def test_an_output_path_that_cannot_be_written_is_one_message(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ReportError, match="cannot write"):
        write_file(blocked / "report.md", "text")
    assert list(tmp_path.iterdir()) == [blocked]
