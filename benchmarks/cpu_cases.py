"""The grid of cpu_attention.py: what is run, in sections; no torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace

CONTEXTS = {"1k": 1024, "4k": 4096, "16k": 16384}


@dataclass(frozen=True)
class Case:
    """One step of a batch: sequence s has q_lens[s] new tokens after past[s] cached ones.

    window 0 and soft_cap 0 are off. plain: the case that a feature's cost is told against; it runs beside this one.
    """

    section: str
    name: str
    q_lens: tuple[int, ...]
    past: tuple[int, ...]
    dtype: str = "bfloat16"
    cache: str = "auto"
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    block: int = 32
    window: int = 0
    soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    plain: Case | None = None

    @property
    def key(self) -> str:
        """What --only is looked for in."""
        return f"{self.section}/{self.name}"

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Keys of each sequence, the new tokens' own included."""
        return tuple(q + p for q, p in zip(self.q_lens, self.past, strict=True))

    @property
    def element_bytes(self) -> int:
        """Of one number in the cache."""
        return 1 if self.cache != "auto" else 4 if self.dtype == "float32" else 2

    @property
    def cache_bytes(self) -> int:
        """K and V that the step can see."""
        first = [max(0, p - self.window + 1) if self.window else 0 for p in self.past]
        keys = sum(length - low for length, low in zip(self.kv_lens, first, strict=True))
        return 2 * keys * self.kv_heads * self.size * self.element_bytes

    @property
    def flops(self) -> int:
        """Multiplications and additions of QK and PV on visible keys."""
        return (
            4 * self.size * self.heads * sum(self._visible(q, p) for q, p in zip(self.q_lens, self.past, strict=True))
        )

    def _visible(self, tokens: int, past: int) -> int:
        if not self.window:
            return tokens * past + tokens * (tokens + 1) // 2
        return sum(min(self.window, past + i + 1) for i in range(tokens))

    @property
    def decodes(self) -> bool:
        """One new token in every sequence."""
        return set(self.q_lens) == {1}


def decode(section: str, batch: int, context: str, **fields: object) -> Case:
    """A decode step of batch sequences of equal length."""
    length = CONTEXTS[context]
    return Case(section, f"decode b{batch} {context}", (1,) * batch, (length - 1,) * batch, **fields)


def prefill(section: str, batch: int, tokens: int, **fields: object) -> Case:
    """batch whole prompts of equal length."""
    return Case(section, f"prefill {batch}x{tokens}", (tokens,) * batch, (0,) * batch, **fields)


def mixed(section: str, **fields: object) -> Case:
    """A chunked step: four chunks of 256 tokens at four depths, and sixteen decodes of 1k to 4k keys."""
    depths = tuple(1023 + 205 * i for i in range(16))
    return Case(section, "mixed 4x256+16", (256,) * 4 + (1,) * 16, (0, 512, 1024, 2048, *depths), **fields)


def named(case: Case, suffix: str, **fields: object) -> Case:
    """The case with something changed, which its name says."""
    return replace(case, name=f"{case.name} {suffix}", **fields)


def decodes(section: str, most_bytes: float, **fields: object) -> list[Case]:
    """The grid batch 1, 8, 32 x context 1k, 4k, 16k, as far as the cache stays under most_bytes."""
    grid = [decode(section, batch, context, **fields) for batch in (1, 8, 32) for context in CONTEXTS]
    return [case for case in grid if case.cache_bytes <= most_bytes]


def prefills(section: str, **fields: object) -> list[Case]:
    """One long prompt, and four short ones."""
    return [prefill(section, 1, 2048, **fields), prefill(section, 4, 512, **fields)]


def shapes() -> list[Case]:
    """Head sizes, group sizes and block sizes other than the grid's, each in cache and out of cache."""
    changes = [("head", f"d{size}", {"size": size}) for size in (64, 96, 256)]
    changes += [("group", f"g{32 // kv}", {"kv_heads": kv}) for kv in (32, 16, 4)]
    changes += [("block", f"p{block}", {"block": block}) for block in (16, 64, 128)]
    steps = [lambda s: decode(s, 1, "4k"), lambda s: decode(s, 8, "4k"), lambda s: prefill(s, 1, 2048)]
    return [named(step(axis), suffix, **fields) for axis, suffix, fields in changes for step in steps]


def features() -> list[Case]:
    """Each feature alone, beside the plain kernel on the same visible keys; no peers, the question is our own cost."""
    changes = {"soft cap": {"soft_cap": 30.0}, "alibi": {"alibi": True}, "sinks": {"sinks": True}, "lse": {"lse": True}}
    found = []
    for step, context in ((1, "4k"), (8, "1k"), (8, "4k")):
        plain = decode("feature", step, context)
        keys, deeper = plain.kv_lens[0], tuple(4 * length - 1 for length in plain.kv_lens)
        found += [named(plain, word, plain=plain, **fields) for word, fields in changes.items()]
        found.append(named(plain, f"window in {4 * keys // 1024}k", past=deeper, window=keys, plain=plain))
    plain = prefill("feature", 1, 2048)
    found += [named(plain, word, plain=plain, **fields) for word, fields in changes.items()]
    return [*found, named(plain, "window 512", window=512, plain=plain)]


def grid(lane: str) -> list[Case]:
    """The cases of a lane: ``one`` and ``two`` threads, or ``avx2`` kernels (one thread)."""
    if lane == "avx2":
        steps = [decode("avx2", 1, "4k"), decode("avx2", 8, "1k"), decode("avx2", 8, "4k")]
        return [*steps, *(named(step, "fp32", dtype="float32") for step in steps)]
    whole = decodes("bf16", 2.2e9) + prefills("bf16") + [mixed("bf16")]
    if lane == "two":
        return [*whole, decode("fp32", 8, "4k", dtype="float32"), decode("fp8", 8, "4k", cache="fp8_e4m3")]
    whole += (
        decodes("fp32", 1.1e9, dtype="float32") + prefills("fp32", dtype="float32") + [mixed("fp32", dtype="float32")]
    )
    whole += decodes("fp8", 1.1e9, cache="fp8_e4m3") + prefills("fp8", cache="fp8_e4m3")
    return [*whole, named(decode("fp8", 8, "4k"), "e5m2", cache="fp8_e5m2"), *shapes(), *features()]
