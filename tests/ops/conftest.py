"""Compiles the CPU kernels once per session (the user's cache makes repeats free) and loads them."""

from __future__ import annotations

import pytest
import torch

from speccompile.build.plugin import build_cpu_plugin, load_plugin


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory):
    info = build_cpu_plugin(tmp_path_factory.mktemp("plugin"))
    load_plugin(info.path)
    return info


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
