"""``heedful select``: which backend would serve a request, and every reason against every other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli import options
from heedful.cli.output import note, show, write, write_json
from heedful.errors import SelectionError
from heedful.types import Candidate, Selection, SelectionRequest

if TYPE_CHECKING:
    from rich.table import Table


def command(
    head_size: Annotated[int, typer.Option(help="Elements per head of Q and K.")] = 128,
    sliding_window: Annotated[int | None, typer.Option(help="Visible keys, the token itself included.")] = None,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Model dtype.", autocompletion=options.complete_dtype)
    ] = "bfloat16",
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Cache dtype.", autocompletion=options.complete_kv_cache_dtype)
    ] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens per cache page.")] = 16,
    attention_free: Annotated[bool, typer.Option("--attention-free", help="The model has no attention.")] = False,
    blocksparse: Annotated[bool, typer.Option("--blocksparse", help="Block-sparse attention.")] = False,
    num_heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="KV heads; must divide the query heads.")] = None,
    head_size_v: Annotated[int | None, typer.Option(help="Elements per head of V where it differs.")] = None,
    attn_type: Annotated[
        str, typer.Option(metavar="TYPE", help="Attention type.", autocompletion=options.complete_attn_type)
    ] = "decoder",
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi biases.")] = False,
    logits_soft_cap: Annotated[float | None, typer.Option(help="Soft cap of the logits.")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="One attention sink a head.")] = False,
    platform: options.Platform = None,
    capability: options.Capability = None,
    arch: options.Arch = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help=f"One of {', '.join(options.POLICIES)}; default: HEEDFUL_POLICY, else strict.",
            autocompletion=options.complete_policy,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Ask for this backend and no other, as HEEDFUL_ATTENTION_BACKEND does.",
            autocompletion=options.complete_backend,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Say which backend would serve a request, and every reason against every candidate.

    A platform that is not this machine's is simulated: its libraries count as installed, and the record says so.
    """
    request = SelectionRequest(
        head_size=head_size,
        sliding_window=sliding_window,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        is_attention_free=attention_free,
        is_blocksparse=blocksparse,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size_v=head_size_v,
        attn_type=attn_type,
        alibi=alibi,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
    )
    answer({"request": request, "policy": policy, "override": backend}, platform, capability, arch, as_json)


def answer(
    question: dict[str, Any], platform: str | None, capability: str | None, arch: str | None, as_json: bool
) -> None:
    """Decide, print the decision, and fail with the selection's exit code when nothing can serve the request."""
    from heedful import selector

    device = options.device_from(platform, capability, arch)
    selection, refusal = None, ""
    try:
        selection = selector.explain(device=device, **question)
    except SelectionError as error:
        if not isinstance(error.selection, Selection):
            raise
        selection, refusal = error.selection, str(error).splitlines()[0]
    report(selection, as_json)
    if selection.backend is None:
        raise SelectionError(refusal or _refusal(selection), selection)


def report(selection: Selection, as_json: bool) -> None:
    """Print one decision: its record as JSON, or a headline and a table."""
    if as_json:
        write_json(selection.to_dict())
    else:
        write(str(selection).splitlines()[0] + ("  [simulated device]" if selection.device.simulated else ""))
        show(table(selection))
    for warning in selection.warnings:
        note(f"warning: {warning}")


def table(selection: Selection) -> Table:
    """Every candidate in the order it was looked at, with all its reasons."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False)
    for title in ("", "backend", "what stands in the way, or what would run"):
        grid.add_column(title, overflow="fold")
    for candidate in selection.candidates:
        mark = "*" if candidate.backend == selection.backend else ""
        grid.add_row(*map(Text, (mark, candidate.backend, _told(candidate))))
    return grid


def _told(candidate: Candidate) -> str:
    if candidate.reasons:
        return "\n".join(map(str, candidate.reasons))
    return ": ".join(filter(None, (f"can serve it, as variant {candidate.variant}", candidate.facts)))


def _refusal(selection: Selection) -> str:
    return (
        f"no backend can serve this request on {selection.device} (policy {selection.policy}); "
        "the table names what stands in the way of each: change one of those, or the platform"
    )
