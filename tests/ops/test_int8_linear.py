"""``int8_linear``: the kernel equals integer arithmetic in plain PyTorch, bit for bit, in any company."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speccompile.build.plugin import PluginInfo
from speccompile.files import package_data
from speccompile.ops import int8_linear
from speccompile.ops.int8_linear import PANEL, pack_weight, quantize_weight, reference, unpack_weight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (5, 3), (33, 7), (64, 130), (100, 577), (576, 960), (3072, 576)]


def weights(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    integer, scale = quantize_weight(torch.randn(outputs, inputs))
    return pack_weight(integer), scale


def by_hand(x: Tensor, weight: Tensor) -> Tensor:
    """Quantized weights times quantized rows, in Python integers and float32."""
    q_w, s_w = quantize_weight(weight)
    largest = x.float().abs().amax(1)
    q_x = (x.float() * (largest.new_tensor(127.0) / largest)[:, None]).round()
    out = torch.empty(len(x), len(weight))
    for t, row in enumerate(q_x.int().tolist()):
        for n, column in enumerate(q_w.int().tolist()):
            total = torch.tensor(sum(a * b for a, b in zip(row, column, strict=True)), dtype=torch.float32)
            out[t, n] = total * (largest[t] / 127 * s_w[n])
    return out


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32)) or (
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_equals_arithmetic_by_hand(dtype):
    weight, x = torch.randn(9, 13), torch.randn(4, 13).to(dtype)
    integer, scale = quantize_weight(weight)
    assert torch.equal(reference(x, pack_weight(integer), scale), by_hand(x, weight))


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_equals_reference(shape, dtype):
    packed, scale = weights(*shape)
    for rows in (1, 2, 3, 11, 12, 13, 16, 25, 64):
        x = (torch.randn(rows, shape[1]) * 10 ** torch.randn(rows, 1)).to(dtype)
        assert same(int8_linear(x, packed, scale), reference(x, packed, scale)), rows


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_does_not_depend_on_its_company_or_on_threads(threads):
    packed, scale = weights(1000, 576)
    x = torch.randn(64, 576).bfloat16()
    before = torch.get_num_threads()
    alone = torch.cat([int8_linear(row[None], packed, scale) for row in x])
    try:
        torch.set_num_threads(threads)
        for rows in range(1, 65):
            assert torch.equal(int8_linear(x[:rows], packed, scale), alone[:rows]), rows
            assert torch.equal(int8_linear(x[64 - rows :], packed, scale), alone[64 - rows :]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("plugin")
def test_extreme_values_do_not_overflow():
    """Every product at its largest, in the longest rows of any Llama."""
    inputs = 53248
    ones = torch.ones(34, inputs)
    packed, scale = pack_weight((ones * -127).to(torch.int8)), torch.ones(34)
    expected = torch.full((3, 34), -127.0 * 127 * inputs) / 127 * 2
    out = int8_linear(torch.full((3, inputs), 2.0), packed, scale)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)
    assert torch.equal(int8_linear(torch.full((3, inputs), -2.0), packed, scale), -out)


@pytest.mark.usefixtures("plugin")
def test_zero_rows_tiny_rows_and_rows_without_numbers():
    packed, scale = weights(40, 19)
    x = torch.randn(7, 19)
    x[1], x[2] = 0, x[2] * 2.0**-120
    x[3, 18], x[4, 0], x[5, 5] = torch.nan, torch.inf, -torch.inf
    x[6] = torch.finfo(torch.float32).max
    for out in (int8_linear(x, packed, scale), reference(x, packed, scale)):
        assert (out[1:3] == 0).all()
        assert out[3:6].isnan().all()
        assert torch.equal(out[0], reference(x[:1], packed, scale)[0])
        assert not out[6].isnan().any()
    zero, scale = quantize_weight(torch.zeros(4, 19))
    assert (int8_linear(x[:1], pack_weight(zero), scale) == 0).all()


@pytest.mark.usefixtures("plugin")
def test_views_and_no_rows():
    packed, scale = weights(40, 16)
    wide = torch.randn(6, 48)
    for x in (wide[:, 16:32], wide[::2, :16], wide.t()[:16].t(), torch.randn(16, 6).t(), wide[:0, :16]):
        assert torch.equal(int8_linear(x, packed, scale), reference(x, packed, scale))


def test_close_to_the_unquantized_product():
    weight, x = torch.randn(96, 256), torch.randn(8, 256)
    integer, scale = quantize_weight(weight)
    error = reference(x, pack_weight(integer), scale) - x @ weight.T
    assert 0 < error.std() < 0.02 * (x @ weight.T).std()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_round_trip(shape):
    integer = torch.randint(-127, 128, shape, dtype=torch.int8)
    packed = pack_weight(integer)
    assert packed.shape == (-(-shape[0] // PANEL), -(-shape[1] // 4), PANEL, 4)
    assert torch.equal(unpack_weight(packed, *shape), integer)


@pytest.mark.usefixtures("plugin")
def test_wrong_operands_are_refused():
    packed, scale = weights(40, 16)
    with pytest.raises(RuntimeError, match="weight"):
        int8_linear(torch.randn(2, 20), packed, scale)
    with pytest.raises(RuntimeError, match="scale"):
        int8_linear(torch.randn(2, 16), packed, scale.double())
    with pytest.raises(RuntimeError, match="at most 65536 inputs"):
        int8_linear(torch.randn(1, 65537), packed, scale)
    with pytest.raises(RuntimeError, match="bf16, fp16 or fp32"):
        int8_linear(torch.randn(2, 16).double(), packed, scale)


HARNESS = """
#include "int8_linear.h"
struct OneThread {
  int threads() const { return 1; }
  template <class F> void run(int, const F& f) const { f(); }
};
extern "C" void run(const float* x, long rows, long inputs, long columns, const signed char* w,
                    const float* scale, float* out) {
  speccompile::int8_linear<float>({x, inputs, rows, inputs, columns, w, scale, out}, OneThread{});
}
"""
ISAS = {"portable": [], "avx2": ["-mavx2", "-mfma", "-mf16c"], "avx512": ["-mavx512f", "-mavx512bw"]}


@pytest.mark.parametrize("isa", list(ISAS))
def test_kernels_of_other_machines(tmp_path: Path, plugin: PluginInfo, isa: str):
    """The paths without VNNI, on this machine."""
    needed = {flag.removeprefix("-m") for flag in ISAS[isa]} - {"mfma", "fma", "f16c"}
    if not needed <= set(plugin.isa.split()):
        pytest.skip(f"this CPU has no {isa}")
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
    source, library = tmp_path / "harness.cpp", tmp_path / "harness.so"
    source.write_text(HARNESS)
    flags = ["-std=c++17", "-O2", "-ffp-contract=fast", "-fPIC", "-shared", "-Wno-psabi", *ISAS[isa]]
    include = f"-I{package_data('plugins') / 'cpu'}"
    subprocess.run([compiler, *flags, include, str(source), "-o", str(library)], check=True)
    kernel = ctypes.CDLL(str(library)).run
    for (outputs, inputs), rows in (((5, 3), 1), ((100, 577), 4), ((64, 130), 13)):
        packed, scale = weights(outputs, inputs)
        x, out = torch.randn(rows, inputs), torch.empty(rows, outputs)
        x[0, 0] = x.abs().max() * 4
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (packed, scale, out)]
        sizes = [ctypes.c_long(n) for n in (rows, inputs, outputs)]
        kernel(ctypes.c_void_p(x.data_ptr()), *sizes, *pointers)
        assert torch.equal(out, reference(x, packed, scale)), (outputs, inputs, rows)
