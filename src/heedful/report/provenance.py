"""Where, when and with what a report was made. Standard library only: versions are read, no package is imported."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from heedful.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from heedful.types import Device

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_FOREIGN_GIT: Final = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
"""Variables that a git hook sets and that would point at another repository than heedful's."""


@dataclass(frozen=True)
class Provenance:
    """Facts about a run. commit and dirty are None where heedful does not run from a checkout.

    image: the digest that the caller stated, or None for a run on the host itself. packages: every installed
    distribution. environment: the HEEDFUL_* variables. started, finished: UTC, ISO 8601.
    """

    heedful: str
    commit: str | None
    dirty: bool | None
    python: str
    packages: Mapping[str, str]
    platform: str
    device: str
    device_name: str
    simulated: bool
    cpu: str
    cores: int
    machine: str
    os: str
    kernel: str
    image: str | None
    command: tuple[str, ...]
    seeds: tuple[int, ...]
    environment: Mapping[str, str]
    started: str
    finished: str

    @property
    def torch(self) -> str:
        """The version of torch, or words that say there is none."""
        return self.packages.get("torch", "not installed")

    @property
    def place(self) -> str:
        """``host``, or the image's digest marked as stated: nobody has checked that the run happened inside it."""
        return "host" if self.image is None else f"{self.image} (stated)"

    def to_dict(self) -> dict[str, Any]:
        """The record kept in a report."""
        return {**asdict(self), "command": list(self.command), "seeds": list(self.seeds)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Provenance:
        """Inverse of to_dict."""
        return cls(**{**record, "command": tuple(record["command"]), "seeds": tuple(record["seeds"])})


def collect(
    device: Device,
    *,
    command: Sequence[str],
    seeds: Sequence[int],
    started: datetime,
    finished: datetime | None = None,
    image_digest: str | None = None,
) -> Provenance:
    """The provenance of a run of this process on a device; ``finished`` is now when it is left out.

    Raises BadInputError for a time without a zone and for an image digest that is none.
    """
    if image_digest is not None and not _DIGEST.fullmatch(image_digest):
        raise BadInputError(f"image digest {image_digest!r} is not of the form sha256:<64 hex digits>")
    packages = _packages()
    commit, dirty = _commit(Path(__file__).parents[1])
    return Provenance(
        heedful=packages.get("heedful", "unknown"),
        commit=commit,
        dirty=dirty,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages=packages,
        platform=device.platform,
        device=str(device),
        device_name=device.name,
        simulated=device.simulated,
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        machine=platform.machine(),
        os=_os_name(),
        kernel=f"{platform.system()} {platform.release()}",
        image=image_digest,
        command=tuple(command),
        seeds=tuple(seeds),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith("HEEDFUL_")},
        started=_utc(started),
        finished=_utc(finished or datetime.now(UTC)),
    )


def _utc(moment: datetime) -> str:
    if moment.tzinfo is None:
        raise BadInputError(f"time {moment.isoformat()} has no zone; give one in UTC")
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _packages() -> dict[str, str]:
    # a broken installation has no name; it is named in doctor's words, not here
    found = ((d.metadata["Name"], d.version) for d in distributions())
    return dict(sorted((re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in found if name))


def _commit(package: Path) -> tuple[str | None, bool | None]:
    """(commit, dirty) of the checkout that holds this very package; (None, None) for an installed one.

    An environment may lie inside a checkout of something else, so git must know the package's own file.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit, changes = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain")
    return commit, None if changes is None else bool(changes)


def _git(directory: Path, *arguments: str) -> str | None:
    environment = {k: v for k, v in os.environ.items() if k not in _FOREIGN_GIT} | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(models, platform.processor() or "unknown")


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()
