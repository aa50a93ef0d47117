"""matrix.yaml: rows that the planner takes, and one clear error with file and line for everything else."""

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from heedful.conformance.plan import Lane
from heedful.conformance.results import Fidelity
from heedful.errors import BadInputError, MatrixError
from heedful.harness import matrix
from heedful.harness.matrix import load_matrix
from heedful.registry import BUILT_IN
from heedful.registry import load as load_backend
from heedful.report.schema import load_schema
from heedful.selector import decide
from heedful.types import DTYPES, KV_CACHE_DTYPES, PLATFORMS, AttentionType, Device, ReasonCode, SelectionRequest

PLAIN = """\
version: "1"
platforms:
  cuda:
    lanes:
      hardware:
        backends: [FLASH_ATTN, "vendor.fast:Backend"]
        profile: smoke
    selections:
      decoder:
        request: {head_size: 128, dtype: float16}
        expect:
          - {generations: ["7.5", "9.0"], backend: XFORMERS}
          - refused: [CAPABILITY, DTYPE]
"""


def load(tmp_path, text):
    path = tmp_path / "matrix.yaml"
    path.write_text(text, encoding="utf-8")
    return load_matrix(path)


def refusal(tmp_path, text):
    with pytest.raises(MatrixError) as caught:
        load(tmp_path, text)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_a_row_becomes_lanes_and_one_expected_selection_a_generation(tmp_path):
    row = load(tmp_path, PLAIN).row("cuda")
    assert row.lanes == (Lane(Fidelity.HARDWARE, ("FLASH_ATTN", "vendor.fast:Backend"), "smoke"),)
    request = SelectionRequest(head_size=128, dtype="float16")
    assert [(s.name, s.request, s.device, s.backend, s.reasons) for s in row.selections] == [
        ("decoder[7.5]", request, Device("cuda", capability=(7, 5)), "XFORMERS", ()),
        ("decoder[9.0]", request, Device("cuda", capability=(9, 0)), "XFORMERS", ()),
        ("decoder", request, Device("cuda"), None, ("CAPABILITY", "DTYPE")),
    ]


def test_generations_of_other_platforms_are_the_device_arch(tmp_path):
    text = PLAIN.replace("cuda:", "rocm:").replace('["7.5", "9.0"]', '["gfx942"]')
    assert load(tmp_path, text).rows[0].selections[0].device == Device("rocm", arch="gfx942")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('version: "1"', "version: 1", "matrix.yaml:1: version: 1 is not a string (put it in quotes)"),
        ('version: "1"', 'version: "2"', 'matrix.yaml:1: version: "2" is not legal here (legal are 1)'),
        ("cuda:", "cudda:", "matrix.yaml:3: platforms.cudda: unknown key 'cudda' (did you mean 'cuda'?)"),
        (
            "profile: smoke",
            "profil: smoke",
            "matrix.yaml:5: platforms.cuda.lanes.hardware: 'profile' is missing\n"
            "matrix.yaml:7: platforms.cuda.lanes.hardware.profil: unknown key 'profil' (did you mean 'profile'?)",
        ),
        (
            "profile: smoke",
            "profile: Full",
            "matrix.yaml:7: platforms.cuda.lanes.hardware.profile: \"Full\" is not legal here (did you mean 'full'?)",
        ),
        (
            '"9.0"]',
            "9.0]",
            "matrix.yaml:12: platforms.cuda.selections.decoder.expect.0.generations.1: "
            "9.0 is not a string (put it in quotes)",
        ),
        (
            '"9.0"]',
            '"sm90"]',
            "matrix.yaml:12: platforms.cuda.selections.decoder.expect.0.generations.1: "
            "'sm90' is not a CUDA capability (write it as \"9.0\")",
        ),
        (
            '"9.0"]',
            '"7.5"]',
            'matrix.yaml:12: platforms.cuda.selections.decoder.expect.0.generations.1: "7.5" stands in the list twice',
        ),
        (
            "- refused: [CAPABILITY, DTYPE]",
            '- {generations: ["9.0"], refused: [DTYPE]}',
            "matrix.yaml:13: platforms.cuda.selections.decoder.expect.1: "
            "generation '9.0' has two expectations (keep one)",
        ),
        (
            "- refused: [CAPABILITY, DTYPE]",
            "- {refused: [DTYPE], backend: XFORMERS}",
            "matrix.yaml:13: platforms.cuda.selections.decoder.expect.1: "
            "give either backend or refused (a decision is one of the two)",
        ),
        (
            "CAPABILITY, DTYPE]",
            "CAPABILITIES]",
            "matrix.yaml:13: platforms.cuda.selections.decoder.expect.1.refused.0: "
            "\"CAPABILITIES\" is not legal here (did you mean 'CAPABILITY'?)",
        ),
        (
            "head_size: 128,",
            "head_size: 128, num_heads: 5, num_kv_heads: 2,",
            "matrix.yaml:10: platforms.cuda.selections.decoder.request: num_heads 5 is not a multiple of "
            "num_kv_heads 2; each KV head serves the same number",
        ),
        (
            "head_size: 128,",
            "head_sise: 128,",
            "matrix.yaml:10: platforms.cuda.selections.decoder.request: 'head_size' is missing\n"
            "matrix.yaml:10: platforms.cuda.selections.decoder.request.head_sise: unknown key 'head_sise' "
            "(did you mean 'head_size'?)",
        ),
        (
            "backends: [FLASH_ATTN,",
            "backends: [FLASH-ATTN,",
            'matrix.yaml:6: platforms.cuda.lanes.hardware.backends.0: "FLASH-ATTN" does not have the form '
            "^[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_]*)?$",
        ),
    ],
)
def test_a_breach_is_named_with_its_line_and_the_nearest_legal_word(tmp_path, old, new, message):
    assert old in PLAIN
    assert refusal(tmp_path, PLAIN.replace(old, new)) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('version: "1"\nversion: "1"\n', "2: key 'version' stands here twice; the first is on line 1"),
        ("a: &x [1]\nb: *x\n", "2: aliases are not read; write out what *x means"),
        ("a: 1\nb: !!python/object:os.system 1\n", "2: tag tag:yaml.org,2002:python/object:os.system is not read"),
        ("a: [1\nb: {", "2: not readable as YAML: expected ',' or ']', but got ':'"),
        ("a: 1\n1: 2\n", "2: key 1 is not a string; put it in quotes"),
        ("a: 1\n[b]: 2\n", "2: key a list or mapping is not a string; put it in quotes"),
        (f"a: {'9' * 5000}\n", "1: 9999999999999999999999999999999999999999 is not a number"),
        ("a: 1\n---\nb: 2\n", "2: not readable as YAML: but found another document"),
        ("", "1: the whole document: null is not an object"),
        ("- 1\n", "1: the whole document: [1] is not an object"),
        ("a: \x00\n", "1: not readable as YAML: unacceptable character #x0000"),
    ],
)
def test_a_file_that_is_not_plain_yaml_is_one_error_with_its_line(tmp_path, text, message):
    told = refusal(tmp_path, text)
    assert told.startswith(f"matrix.yaml:{message}")
    assert "\n" not in told


def test_nesting_without_end_is_an_error_and_no_crash(tmp_path):
    assert refusal(tmp_path, "a: " + "[" * 5000 + "]" * 5000) == (
        "matrix.yaml:1: nested deeper than 20 levels, which no matrix is"
    )


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(MatrixError, match=r"cannot read .*none\.yaml: No such file"):
        load_matrix(tmp_path / "none.yaml")
    (tmp_path / "matrix.yaml").write_bytes(b'version: "\xff"')
    with pytest.raises(MatrixError, match="is not a text file in UTF-8: invalid start byte at byte 10"):
        load_matrix(tmp_path / "matrix.yaml")


def test_yes_and_on_stay_text_and_dates_stay_text(tmp_path):
    text = PLAIN.replace("vendor.fast:Backend", "on").replace('"9.0"', "yes").replace("cuda:", "tpu:")
    row = load(tmp_path, text).row("tpu")
    assert row.lanes[0].backends == ("FLASH_ATTN", "on")
    assert row.selections[1].device.arch == "yes"


WAIVED = """\
version: "1"
platforms:
  cpu:
    lanes:
      hardware: {backends: [TORCH_SDPA], profile: smoke}
    waivers:
      - pattern: cpu/TORCH_SDPA/*
        outcome: FAIL
        reason: a library's bug
        owner: ada
        issue: tracker#7
        expires: 2026-12-31
"""


def test_a_waiver_is_read_with_its_last_day(tmp_path):
    (waiver,) = load(tmp_path, WAIVED).row("cpu").waivers
    assert (waiver.pattern, waiver.outcome, waiver.expires) == ("cpu/TORCH_SDPA/*", "FAIL", "2026-12-31")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("SDPA/*", "SPDA/*", "matrix.yaml:7: platforms.cpu.waivers.0.pattern: 'cpu/TORCH_SPDA/*' matches none of the"),
        ("12-31", "02-30", "matrix.yaml:7: platforms.cpu.waivers.0: waiver 'cpu/TORCH_SDPA/*' expires '2026-02-30'"),
        ("FAIL", "NOT_RUN", 'matrix.yaml:8: platforms.cpu.waivers.0.outcome: "NOT_RUN" is not legal here'),
        ("owner: ada", 'owner: ""', "matrix.yaml:7: platforms.cpu.waivers.0: waiver 'cpu/TORCH_SDPA/*' says nothing"),
    ],
)
def test_a_waiver_that_nothing_can_use_is_refused(tmp_path, old, new, message):
    assert refusal(tmp_path, WAIVED.replace(old, new)).startswith(message)


def test_a_platform_without_a_row_is_named_with_the_near_miss(tmp_path):
    with pytest.raises(BadInputError, match=r"has no row for platform 'cudda'; did you mean 'cuda'\?"):
        load(tmp_path, PLAIN).row("cudda")


def test_the_matrix_here_comes_first_and_the_shipped_one_after_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = load_matrix()
    assert [row.platform for row in shipped.rows] == ["cpu", "cuda", "rocm", "xpu", "tpu", "openvino"]
    load(tmp_path, PLAIN)
    assert load_matrix().source == "matrix.yaml"
    assert [row.platform for row in load_matrix().rows] == ["cuda"]


def test_an_installation_without_a_matrix_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(matrix, "_SHIPPED", (Path("elsewhere") / "matrix.yaml",))
    with pytest.raises(MatrixError, match=r"there is no matrix.yaml here and this installation carries none"):
        load_matrix()


def test_the_schema_is_legal_and_names_what_the_types_name():
    schema = load_schema("heedful.harness", "matrix.schema.json")
    Draft202012Validator.check_schema(schema)
    definitions = schema["$defs"]
    request = definitions["request"]["properties"]
    assert set(schema["properties"]["platforms"]["properties"]) == set(PLATFORMS)
    assert set(definitions["row"]["properties"]["lanes"]["properties"]) == set(Fidelity)
    assert definitions["expectation"]["properties"]["refused"]["items"]["enum"] == list(ReasonCode)
    assert set(request) == set(SelectionRequest.__dataclass_fields__)
    assert request["dtype"]["enum"] == list(DTYPES)
    assert request["kv_cache_dtype"]["enum"] == list(KV_CACHE_DTYPES)
    assert request["attn_type"]["enum"] == list(AttentionType)


REPOSITORY = Path(__file__).parents[3]
OURS = load_matrix(REPOSITORY / "matrix.yaml")
PROMISES = [pytest.param(row, s, id=f"{row.platform}/{s.name}") for row in OURS.rows for s in row.selections]


@pytest.mark.parametrize(("row", "promise"), PROMISES)
def test_the_selector_keeps_every_promise_of_our_matrix(row, promise):
    assert promise.device.platform == row.platform
    decision = decide(promise.request, promise.device)
    codes = {str(reason.code) for candidate in decision.candidates for reason in candidate.reasons}
    assert decision.backend == promise.backend, str(decision)
    assert set(promise.reasons) <= codes, str(decision)


def test_every_claim_of_a_platform_stands_in_its_hardware_lane():
    claimed = {
        platform: {name for name in BUILT_IN for row in load_backend(name).CAPABILITIES if row.platform == platform}
        for platform in PLATFORMS
    }
    proven = {row.platform: {name for lane in row.lanes for name in lane.backends} for row in OURS.rows}
    assert proven == claimed


def test_our_first_choices_are_pinned_for_every_known_cuda_generation():
    pinned = {s.device.generation for s in OURS.row("cuda").selections if s.name.startswith("decoder-bf16-page-256")}
    assert pinned >= {"7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"}
