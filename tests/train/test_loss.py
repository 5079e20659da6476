"""The trainer's unrolled forward is the runtime's draft, and its labels are the target's (probe R03)."""

import pytest
import torch

from speccompile.train.batches import Batch, supervision
from speccompile.train.features import FeatureSource
from speccompile.train.fusion import eagle1_pairs, ridge_map
from speccompile.train.initial import empty_head, fill_fusion, fill_layers, new_head_config
from speccompile.train.loss import soft_cross_entropy
from speccompile.train.step import step_results, total_loss
from speccompile.train.unroll import unroll
from tests.model.dense import dense_causal_attend
from tests.train.tiny import EOS, tiny_cache, tiny_config, tiny_target


def live_head(target, layers=1, draft_vocab=48):
    """A head whose every branch contributes."""
    torch.manual_seed(5)
    ids = torch.arange(0, 2 * draft_vocab, 2)
    h = target.config.hidden_size
    config = tiny_config(layers=layers)
    head = empty_head(new_head_config(config, target, draft_vocab), target, ids)
    fill_layers(head, target, config, 0, None)
    fill_fusion(head, torch.randn(h, 2 * h) * 0.2, target, 1.0)
    with torch.no_grad():
        for layer in head.layers:
            layer.self_attn.o_proj.weight.normal_(std=0.05)
            layer.mlp.down_proj.weight.normal_(std=0.05)
    return head, ids


def runtime_draft(head, token, feature, column, steps):
    """What the engine computes after position ``column``: true pairs up to it, then the head's own output,
    fed with the tokens of the text; one growing sequence through plain causal attention."""
    tokens, hiddens = [token[1 : column + 2]], [feature[: column + 1]]
    out = []
    for step in range(steps):
        sequence_t, sequence_h = torch.cat(tokens), torch.cat(hiddens)
        fed, scored = head(sequence_t, sequence_h, torch.arange(len(sequence_t)), dense_causal_attend)
        out.append(scored[-1])
        tokens.append(token[column + 2 + step : column + 3 + step])
        hiddens.append(fed[-1:])
    return torch.stack(out)


@pytest.mark.parametrize("layers", [1, 2])
def test_unrolled_steps_equal_the_runtime_draft(layers, tmp_path):
    target = tiny_target()
    cache = tiny_cache(tmp_path, target)
    head, _ = live_head(target, layers)
    ref = max(cache.refs, key=lambda r: r.features)
    token, feature = cache.tokens(ref)[0], cache.feature(ref, "hidden")
    steps = torch.stack([scored for _, scored in unroll(head, token[None], feature[None], 3)])[:, 0]
    for column in range(len(feature) - 3):
        with torch.no_grad():
            expected = runtime_draft(head, token, feature, column, 3)
        torch.testing.assert_close(steps[:, column], expected, rtol=1e-3, atol=1e-3)


def test_long_sequences_take_another_kernel_to_the_same_end(tmp_path, monkeypatch):
    target = tiny_target()
    cache = tiny_cache(tmp_path, target)
    head, _ = live_head(target, 2)
    batch = FeatureSource(target, cache).batch(cache.refs[:3], 64, lambda _i, a: a)
    short = [scored for _, scored in unroll(head, batch.token, batch.feature, 2)]
    monkeypatch.setattr("speccompile.train.unroll._SHORT", 0)
    long = [scored for _, scored in unroll(head, batch.token, batch.feature, 2)]
    for a, b in zip(short, long, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_columns_that_are_left_out_change_nothing_in_the_others(tmp_path):
    target = tiny_target()
    cache = tiny_cache(tmp_path, target)
    head, _ = live_head(target, 2)
    refs = sorted(cache.refs, key=lambda r: r.features)[-3:]
    batch = FeatureSource(target, cache).batch(refs, 64, lambda _i, a: a)
    drafted = torch.rand(batch.feature.shape[:2], generator=torch.Generator().manual_seed(0)) < 0.5
    every = unroll(head, batch.token, batch.feature, 3)
    some = unroll(head, batch.token, batch.feature, 3, drafted)
    for all_columns, few in zip(every, some, strict=True):
        for a, b in zip(all_columns, few, strict=True):
            torch.testing.assert_close(a[drafted], b[drafted])


def test_loss_is_cross_entropy_to_the_target_at_the_drafted_position(tmp_path):
    target = tiny_target()
    cache = tiny_cache(tmp_path, target)
    head, ids = live_head(target)
    refs = sorted(cache.refs, key=lambda r: r.features)[-3:]

    def answers(ids, answer):
        return supervision(ids, answer, torch.tensor([EOS]), False)

    batch = FeatureSource(target, cache).batch(refs, 64, answers)
    results = step_results(head, batch, 2, soft_cross_entropy, head.lm_head.weight)
    for step, result in enumerate(results):
        loss = count = 0.0
        for ref in refs:
            token, answer = cache.tokens(ref)
            feature = cache.feature(ref, "hidden")
            for column in range(len(feature) - 1 - step):
                if answer[column + 2 + step]:
                    teacher = target.lm_head(feature[column + 1 + step])[ids].softmax(-1)
                    scored = runtime_draft(head, token, feature, column, step + 1)[-1]
                    loss -= float((teacher @ target.lm_head(scored)[ids].log_softmax(-1)).detach())
                    count += 1
        assert result.count == count
        assert float(result.token_loss.detach()) == pytest.approx(loss, rel=1e-4)
    both = total_loss(results, [r.count for r in results], 0.5, 0.0)
    first, second = (float(r.token_loss.detach()) / r.count for r in results)
    assert float(both.detach()) == pytest.approx((first + 0.5 * second) / 1.5, rel=1e-5)


def test_the_second_step_reads_the_text_not_the_drafts_guess(tmp_path):
    """Probe R03: changing the head's scores must not change what step 2 is fed."""
    target = tiny_target()
    cache = tiny_cache(tmp_path, target)
    head, _ = live_head(target)
    seen = []
    forward = head.embed_tokens.forward

    def spy(token):
        seen.append(token.clone())
        return forward(token)

    head.embed_tokens.forward = spy
    ref = cache.refs[0]
    token = cache.tokens(ref)[0]
    list(unroll(head, token[None], cache.feature(ref, "hidden")[None], 2))
    assert torch.equal(seen[0][0], token[1:])
    assert torch.equal(seen[1][:-1], token[2:])


def test_supervision_covers_answers_with_their_end_and_nothing_else():
    ids = torch.tensor([5, 6, 30, 31, EOS, 7, 8, 40, EOS, 9])
    answer = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 1]).bool()
    mask = supervision(ids, answer, torch.tensor([EOS]), False)
    assert mask.tolist() == [False, False, True, True, True, False, False, True, True, False]
    assert supervision(ids, answer, torch.tensor([EOS]), True).all()


def test_a_batch_without_labels_has_no_loss(tmp_path):
    target = tiny_target()
    cache = tiny_cache(tmp_path, target)
    head, _ = live_head(target)
    batch = FeatureSource(target, cache).batch(cache.refs[:2], 64, lambda _i, a: torch.zeros_like(a))
    results = step_results(head, batch, 3, soft_cross_entropy, head.lm_head.weight)
    loss = total_loss(results, [r.count for r in results], 0.8, 0.1)
    loss.backward()
    assert float(loss.detach()) == 0.0


def test_padding_changes_nothing(tmp_path):
    target = tiny_target()
    cache = tiny_cache(tmp_path, target)
    head, _ = live_head(target)
    refs = sorted(cache.refs, key=lambda r: r.features)
    short, long = refs[0], refs[-1]
    assert short.features < long.features

    def loss(chosen: list) -> tuple[float, int]:
        batch: Batch = FeatureSource(target, cache).batch(chosen, 64, lambda _i, a: a)
        result = step_results(head, batch, 2, soft_cross_entropy, head.lm_head.weight)[1]
        return float(result.token_loss.detach()), result.count

    (a, n), (b, m), (c, k) = loss([short]), loss([long]), loss([short, long])
    assert (k, c) == (n + m, pytest.approx(a + b, rel=1e-5))


def test_linear_start_is_the_least_squares_map():
    torch.manual_seed(0)
    embed = torch.randn(30, 4)
    truth = torch.randn(4, 8)
    ids = torch.randint(0, 30, (400,))
    feature = [torch.randn(4)]
    for i in range(398):
        feature.append(torch.tanh(truth @ torch.cat((embed[ids[i + 1]], feature[-1]))))
    feature = torch.stack(feature)
    fc, _ = ridge_map(eagle1_pairs(embed, [(ids, feature, feature)]))
    pair = torch.cat((embed[ids[1:399]], feature[:-1]), dim=1)
    expected = torch.linalg.lstsq(pair, feature[1:]).solution.T
    torch.testing.assert_close(fc, expected, rtol=0.02, atol=0.02)
