"""Where a run starts: fresh layers, warm starts, and what they refuse."""

import pytest
import torch

from speccompile.errors import ConfigError
from speccompile.train.cache import RolloutCache
from speccompile.train.features import FeatureSource, run_target
from speccompile.train.initial import WarmStart, head_aux_layers
from speccompile.train.start import start_head
from speccompile.train.unroll import unroll
from tests.model.dense import dense_causal_attend
from tests.train.test_same_draft import IDS, live_head
from tests.train.tiny import VOCAB, tiny_cache, tiny_config, tiny_target

AUX = {"eagle1": "", "eagle3": "0,1,2"}


def begin(tmp_path, start=None, ids=IDS, **changes):
    target = tiny_target()
    if not (tmp_path / "cache").exists():
        tiny_cache(tmp_path / "cache", target)
    config = tiny_config(**changes)
    layers = head_aux_layers(config, target, start)
    source = FeatureSource(target, RolloutCache(tmp_path / "cache", 0), layers)
    return start_head(config, source, ids, start), source


def scored(head, source):
    batch = source.batch(source.cache.refs[:4], 64, lambda _ids, answer: answer)
    with torch.no_grad():
        return [head.lm_head(s) for _, s in unroll(head, batch.token, batch.feature, 2)], batch


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_further_layers_of_a_warm_start_are_silent(kind, tmp_path):
    old = WarmStart(live_head(tiny_target(), kind, 1), IDS)
    head, source = begin(tmp_path, old, kind=kind, layers=3)
    assert len(head.layers) == 3
    for a, b in zip(scored(head, source)[0], scored(old.head, source)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    weight = head.layers[2].self_attn.qkv_proj.weight
    assert weight.requires_grad
    assert weight.abs().sum() > 0, "silent, but ready to learn"


def test_live_layers_with_norms_go_on_like_the_target(tmp_path):
    """With a perfect ``fc`` the head computes what the target's own last layers do."""
    changes = {"layer_norms": "yes", "init_layers": "target", "from_layers": "1,2", "layers": 2}
    head, source = begin(tmp_path, **changes)
    target, ids = source.target, source.cache.tokens(source.cache.refs[0])[0]
    (found,) = run_target(target, [ids], (1,))
    head.fc = torch.nn.Identity()
    head.embed_tokens = torch.nn.Embedding.from_pretrained(torch.empty(VOCAB, 0))
    position = torch.arange(len(ids))
    fed, scored = head(ids, found.aux, position, dense_causal_attend)
    assert torch.equal(fed, scored)
    torch.testing.assert_close(fed, found.hidden, rtol=1e-4, atol=1e-4)


def test_layer_norms_start_from_the_stream_that_live_layers_read(tmp_path):
    changes = {"layer_norms": "yes", "init_layers": "target", "from_layers": "2"}
    head, source = begin(tmp_path, **changes)
    errors = []
    for ref in source.cache.refs[:8]:
        ids = source.cache.tokens(ref)[0]
        (found,) = run_target(source.target, [ids], (2,))
        pair = torch.cat((source.target.embed_tokens(ids[1:]), found.hidden[:-1]), -1)
        wanted = found.aux[1:]
        with torch.no_grad():
            errors.append(float((head.fc(pair) - wanted).square().sum() / wanted.square().sum()))
    assert sum(errors) / len(errors) < 0.9, "better than predicting nothing"


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_warm_start_may_change_the_vocabulary(kind, tmp_path):
    target, ids = tiny_target(), torch.arange(20, 80)
    old = WarmStart(live_head(target, kind, 2), IDS)
    if kind == "eagle3":
        torch.nn.init.normal_(old.head.lm_head.weight)
    head, _ = begin(tmp_path, old, ids, kind=kind, layers=2)
    for row, token in enumerate(ids.tolist()):
        known = token in IDS.tolist() and kind == "eagle3"
        own = old.head.lm_head.weight[IDS.tolist().index(token)] if known else target.lm_head.weight[token]
        assert torch.equal(head.lm_head.weight[row], own)
    assert head.lm_head.weight.requires_grad is (kind == "eagle3")


def test_a_warm_start_brings_its_aux_layers(tmp_path):
    old = WarmStart(live_head(tiny_target(), "eagle3", 1, aux_layers="1,2"), IDS)
    head, source = begin(tmp_path, old, kind="eagle3")
    assert head.config.aux_layers == source.aux_layers == (1, 2)


@pytest.mark.parametrize(
    ("kind", "layers", "changes", "message"),
    [
        ("eagle1", 1, {"kind": "eagle3", "aux_layers": "0,1,2"}, "that head is eagle1.*give --kind eagle1"),
        ("eagle1", 3, {"layers": 2}, "that head has 3 layers, more than --layers 2"),
        ("eagle3", 1, {"kind": "eagle3", "aux_layers": "0,2"}, r"reads aux layers \[0, 1, 2\]"),
        ("eagle3", 1, {"kind": "eagle3", "train_lm_head": "no"}, "give --train-lm-head yes"),
    ],
)
def test_warm_starts_that_cannot_be(kind, layers, changes, message, tmp_path):
    old = WarmStart(live_head(tiny_target(), kind, layers), IDS)
    with pytest.raises(ConfigError, match=message):
        begin(tmp_path, old, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "eagle3"}, "aux_layers.*collapse for a target of 3 layers"),
        ({"kind": "eagle3", "aux_layers": "0,1,3"}, r"aux_layers \[0, 1, 3\]: the target has layers 0 to 2"),
        ({"kind": "eagle3", "aux_layers": "0,0"}, "aux_layers.*distinct"),
        ({"aux_layers": "0,1"}, "aux_layers: only an EAGLE-3 head"),
        ({"from_layers": "0,1"}, r"from_layers \[0, 1\]: must name 1 of the target's layers 0 to 2"),
        ({"from_layers": "3"}, r"from_layers \[3\]"),
        ({"from_layers": "last"}, "from_layers 'last': must be layer numbers"),
        ({"layers": 5}, "a head has 1 to 4"),
        ({"kind": "eagle2"}, "kind 'eagle2': must be one of eagle1, eagle3"),
    ],
)
def test_settings_that_cannot_be(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        begin(tmp_path, **changes)


def test_a_live_layer_adds_what_the_targets_layer_adds(tmp_path):
    """EAGLE-3, second layer: a copy of the target's layer in units of its residual's rms."""
    head, source = begin(
        tmp_path, kind="eagle3", aux_layers="0,1,2", layers=2, init_layers="target", from_layers="0,1"
    )
    target, layer = source.target, head.layers[1]
    x = torch.randn(6, 32)
    cos_sin = target.rotary(torch.arange(6))
    silent, _ = begin(tmp_path, kind="eagle3", aux_layers="0,1,2", layers=2)
    scale = target.layers[1].mlp.down_proj.weight.norm() / layer.mlp.down_proj.weight.norm()
    assert not silent.layers[1].mlp.down_proj.weight.any()
    assert scale > 0
    with torch.no_grad():
        ours = layer(x, cos_sin, dense_causal_attend) - x
        theirs = target.layers[1](x * scale, cos_sin, dense_causal_attend) - x * scale
    torch.testing.assert_close(ours, theirs / scale, rtol=1e-3, atol=1e-3)


def test_silent_eagle3_predicts_the_next_state_linearly(tmp_path):
    """At the start the head is norm(fc(aux)): closer to the target's next token than chance."""
    head, source = begin(tmp_path, kind="eagle3", aux_layers="0,1,2", ids=torch.arange(VOCAB))
    (first, _), batch = scored(head, source)
    with torch.no_grad():
        best = source.target.lm_head(batch.hidden[:, 1:]).argmax(-1)
    real = torch.arange(best.shape[1]) < batch.length[:, None] - 1
    share = (first[:, :-1].argmax(-1) == best)[real].float().mean()
    assert share > 0.15
