"""Rollouts: dense generation against a plain loop, and the state machine of turns."""

import torch

from speccompile.train.cache import RolloutCache, write_shard
from speccompile.train.chat_frame import ChatFrame
from speccompile.train.rollout import Generator, Prompt, RolloutConfig, read_text
from tests.model.dense import dense_causal_attend
from tests.train.tiny import EOS, PROMPT, tiny_target

ENDS = (EOS, *range(30, 45))  # many, so that a random model ends turns
FRAME = ChatFrame(open=(3, 4), close=(EOS,), ask=(20, 21), next_user=(22, 23), marker=(20, 21), eos_ids=ENDS)


def greedy(target, prompt, count):
    """Token by token without any cache."""
    ids = list(prompt)
    for _ in range(count):
        hidden, _ = target(torch.tensor(ids), torch.arange(len(ids)), dense_causal_attend)
        ids.append(int(target.lm_head(hidden[-1]).argmax()))
        if ids[-1] == EOS:
            break
    return ids


def test_greedy_rollouts_equal_a_plain_loop_and_carry_true_features():
    target = tiny_target()
    config = RolloutConfig(
        batch_size=6,
        max_answer=12,
        max_length=40,
        own_prompts=0,
        second_turns=0,
        temperatures=(0.0,),
        aux_layers=(0, 2),
    )
    rollouts = Generator(target, None, PROMPT, config).wave()
    expected = {tuple(greedy(target, p.ids, 12)): len(p.ids) for p in PROMPT}
    assert {tuple(r.ids.tolist()) for r in rollouts} == set(expected)
    for r in rollouts:
        start = expected[tuple(r.ids.tolist())]
        assert r.answer.tolist() == [i >= start for i in range(len(r.ids))]
        hidden, aux = target(r.ids[:-1], torch.arange(len(r.ids) - 1), dense_causal_attend, (0, 2))
        torch.testing.assert_close(r.hidden, hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(r.aux, aux, rtol=1e-4, atol=1e-4)


def test_the_same_seed_gives_the_same_rollouts():
    target = tiny_target()
    config = RolloutConfig(batch_size=5, max_answer=9, max_length=30, own_prompts=0, second_turns=0, seed=3)

    def make():
        return [r.ids.tolist() for r in Generator(target, None, PROMPT, config).wave()]

    assert make() == make()


def test_the_target_writes_prompts_and_asks_follow_ups():
    target = tiny_target(seed=1)
    config = RolloutConfig(
        batch_size=48, max_answer=12, max_user=40, max_length=120, own_prompts=0.5, second_turns=1.0
    )
    own = follow_ups = 0
    for r in Generator(target, FRAME, PROMPT, config).wave():
        ids, answer = r.ids.tolist(), r.answer.tolist()
        if ids[:2] == list(FRAME.open):
            own += 1
            first = answer.index(True)
            assert tuple(ids[first - 2 : first]) == FRAME.ask
            assert ids[first - 3] in ENDS, "the target ended its user turn"
        starts = [i for i in range(1, len(ids)) if answer[i] and not answer[i - 1]]
        follow_ups += len(starts) > 1
        assert len(starts) <= 2
        hidden, _ = target(r.ids[:-1], torch.arange(len(ids) - 1), dense_causal_attend)
        torch.testing.assert_close(r.hidden, hidden, rtol=1e-3, atol=1e-3)
    assert own > 0
    assert follow_ups > 0


def test_given_follow_ups_are_asked_after_the_answers():
    target = tiny_target(seed=1)
    config = RolloutConfig(batch_size=24, max_answer=30, max_length=90, own_prompts=0, second_turns=0)
    prompt = Prompt((5, 6, 7), ((50, 51), (52,)))
    asked = 0
    for r in Generator(target, FRAME, [prompt], config).wave():
        ids, answer = r.ids.tolist(), r.answer.tolist()
        given = [t for t, a in zip(ids[3:], answer[3:], strict=True) if not a]
        turns = [[22, 23, 50, 51, EOS, 20, 21], [22, 23, 52, EOS, 20, 21]]
        assert given in ([], turns[0], turns[0] + turns[1])
        asked = max(asked, len(given))
    assert asked == 13


def test_given_texts_get_the_same_features():
    target = tiny_target()
    ids = torch.tensor([5, 6, 7, 30, 31, EOS])
    r = read_text(target, ids, torch.tensor([0, 0, 0, 1, 1, 1]).bool(), ())
    hidden, _ = target(ids[:-1], torch.arange(5), dense_causal_attend)
    torch.testing.assert_close(r.hidden, hidden, rtol=1e-4, atol=1e-4)


def test_a_cache_returns_what_was_written(tmp_path):
    target = tiny_target()
    config = RolloutConfig(batch_size=4, max_answer=6, max_length=30, own_prompts=0, second_turns=0)
    rollouts = Generator(target, None, PROMPT, config).wave()
    write_shard(tmp_path, "s0-0000", rollouts, {})
    cache = RolloutCache(tmp_path)
    assert len(cache.refs) == len(rollouts)
    for ref, r in zip(cache.refs, rollouts, strict=True):
        ids, answer = cache.tokens(ref)
        assert torch.equal(ids, r.ids)
        assert torch.equal(answer, r.answer)
        assert torch.equal(cache.feature(ref, "hidden"), r.hidden)
