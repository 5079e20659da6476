"""``Int8Linear`` through the engine's own lowering: same bits, packed weights stored once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from speccompile.build.lowering import get_lowering
from speccompile.model.int8 import Int8Linear

INPUTS, OUTPUTS = 512, 8000


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Int8Linear(nn.Linear(INPUTS, OUTPUTS, bias=False).bfloat16(), torch.rand(INPUTS) * 50)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.linear(x * 2.0),)


@pytest.mark.usefixtures("plugin")
def test_a_library_holds_the_packed_weights_once(tmp_path: Path) -> None:
    layer, lowering = Layer().eval(), get_lowering("torch")
    x = torch.randn(40, INPUTS).bfloat16()
    with torch.no_grad():
        program = torch.export.export(layer, (x[:6],), dynamic_shapes=({0: Dim("rows", min=2, max=512)},))
        lowering.compile(program, tmp_path / "layer")
        run = lowering.load(tmp_path / "layer")
        for rows in (2, 7, 40):
            assert torch.equal(run(x[:rows])[0], layer(x[:rows])[0])
    size = (tmp_path / "layer.so").stat().st_size
    assert INPUTS * OUTPUTS < size < 2 * INPUTS * OUTPUTS
