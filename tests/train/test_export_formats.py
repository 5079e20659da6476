"""Every output format is read back as the same head; the file says what it holds."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from speccompile.checkpoint.config import RopeConfig
from speccompile.checkpoint.heads import open_head
from speccompile.errors import ConfigError
from speccompile.model.load import draft_token_ids, load_head
from speccompile.train.export import export_head
from tests.model.dense import dense_causal_attend
from tests.train.test_same_draft import live_head
from tests.train.tiny import VOCAB, tiny_target

IDS = torch.tensor(sorted({0, 2, 3, *range(7, VOCAB, 2)}))
FORMATS = {
    "safeailab": ("SafeAILab/SpecForge EAGLE-3", False),
    "specforge": ("SafeAILab/SpecForge EAGLE-3", False),
    "speculators": ("speculators EAGLE-3", True),
    "modelopt": ("ModelOpt EAGLE-3", True),
}
CASES = [
    (name, layers, feedback)
    for name, (_, can) in FORMATS.items()
    for layers in (1, 3)
    for feedback in (False, can)
]


def rounded(module):
    """Weights as the file keeps them."""
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16().float()


def forward(head, feature, token):
    fed, scored = head(token, head.fuse(feature), torch.arange(len(token)), dense_causal_attend)
    return fed, head.lm_head(scored)


def check_same(head, folder, target):
    rounded(head)
    opened = open_head(folder, target.config)
    assert opened.config == head.config
    assert draft_token_ids(opened.config, opened.tensor).tolist() == IDS.tolist()
    loaded = load_head(opened.config, opened.tensor, target, torch.float32)
    feature, token = torch.randn(7, head.config.feature_size), torch.arange(20, 27)
    with torch.no_grad():
        for a, b in zip(forward(head, feature, token), forward(loaded, feature, token), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    return opened


@pytest.mark.parametrize("layers", [1, 3])
def test_layer_norms_come_back(layers, tmp_path):
    target = tiny_target()
    rounded(target)
    head = live_head(target, "eagle1", layers, layer_norms="yes")
    export_head(tmp_path, head, IDS, target.config)
    check_same(head, tmp_path, target)
    assert json.loads((tmp_path / "config.json").read_text())["layer_norms"] is True


@pytest.mark.parametrize(("name", "layers", "feedback"), sorted(set(CASES)))
def test_eagle3_comes_back_the_same(name, layers, feedback, tmp_path):
    target = tiny_target()
    rounded(target)
    head = live_head(target, "eagle3", layers, feedback, aux_layers="1,2")
    export_head(tmp_path, head, IDS, target.config, name)
    assert check_same(head, tmp_path, target).format_name == FORMATS[name][0]
    stored = load_file(tmp_path / "model.safetensors")
    ids = stored["d2t"] + torch.arange(len(IDS))
    assert ids.tolist() == sorted(ids.tolist())
    if name != "modelopt":
        assert stored["t2d"].nonzero().flatten().tolist() == ids.tolist()


@pytest.mark.parametrize("rope", [
    RopeConfig(theta=1234.0),
    RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=64),
    RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_position_embeddings=32),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_the_rope_it_was_trained_with_is_written(kind, rope, tmp_path):
    target = tiny_target()
    target.config = dataclasses.replace(target.config, rope=rope)
    head = live_head(target, kind, 1)
    export_head(tmp_path, head, IDS, target.config)
    assert open_head(tmp_path, target.config).config.rope == rope


@pytest.mark.parametrize("bias", [False, True])
def test_fc_bias_is_what_the_file_holds(bias, tmp_path):
    """Probe R07."""
    target = tiny_target()
    head = live_head(target, "eagle1", 2)
    if bias:
        head.config = dataclasses.replace(head.config, fc_bias=True)
        head.fc.bias = torch.nn.Parameter(torch.randn(head.config.hidden_size).bfloat16().float())
    rounded(target)
    export_head(tmp_path, head, IDS, target.config)
    assert json.loads((tmp_path / "config.json").read_text())["bias"] is bias
    assert ("fc.bias" in load_file(tmp_path / "model.safetensors")) is bias
    check_same(head, tmp_path, target)


def test_what_a_format_cannot_say_is_refused(tmp_path):
    target = tiny_target()
    ids = IDS
    for name in ("specforge", "speculators", "modelopt"):
        with pytest.raises(ConfigError, match="holds EAGLE-3 heads only"):
            export_head(tmp_path, live_head(target, "eagle1", 1), ids, target.config, name)
    with pytest.raises(ConfigError, match="use --format speculators"):
        export_head(
            tmp_path, live_head(target, "eagle3", 1, norm_feedback=True), ids, target.config, "safeailab"
        )
    with pytest.raises(ConfigError, match="must be one of"):
        export_head(tmp_path, live_head(target, "eagle3", 1), ids, target.config, "gguf")
    for name in ("specforge", "modelopt"):
        with pytest.raises(ConfigError, match="input of layer 0"):
            export_head(tmp_path, live_head(target, "eagle3", 1), ids, target.config, name)
    assert not list(tmp_path.iterdir())
