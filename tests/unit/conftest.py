"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

from heedful import libraries, platforms, registry, selector


def _forget():
    for module in (libraries, platforms, registry, selector):
        module.forget()


@pytest.fixture
def fresh(monkeypatch):
    """Selection as in a new process: nothing kept, no steering variable set."""
    names = (
        "HEEDFUL_ATTENTION_BACKEND",
        "HEEDFUL_POLICY",
        "HEEDFUL_PLATFORM",
        "HEEDFUL_PLUGINS",
        "HEEDFUL_OPENVINO_DEVICE",
        "VLLM_ATTENTION_BACKEND",
    )
    for name in names:
        monkeypatch.delenv(name, raising=False)
    _forget()
    yield
    _forget()
