"""Rollouts: texts against a plain loop with the reference draw, and the state machine of turns."""

import dataclasses
import itertools

import pytest
import torch

from speccompile import ops
from speccompile.errors import ConfigError
from speccompile.runtime.params import SamplingParams
from speccompile.train.cache import CacheError, RolloutCache, write_shard
from speccompile.train.chat_frame import ChatFrame
from speccompile.train.rollout import Generator
from speccompile.train.talk import Prompt, RolloutConfig
from speccompile.tree.named import chain
from tests.model.dense import dense_causal_attend
from tests.runtime.fakes import finish
from tests.runtime.graph import EAGLE1, tiny
from tests.train.tiny import EOS, PROMPT, tiny_target

ENDS = (EOS, *range(30, 45))  # many, so that a random model ends turns
FRAME = ChatFrame(
    open=(3, 4), close=(EOS,), ask=(20, 21), end=(EOS,), next_user=(22, 23), marker=(20, 21), eos_ids=ENDS
)
PLAIN = {"own_prompts": 0.0, "second_turns": 0.0, "max_length": 40, "max_answer": 12}


def take(target, count, prompts=PROMPT, frame=None, **changes):
    config = RolloutConfig(**{**PLAIN, "batch_size": 6, **changes})
    return list(itertools.islice(Generator(target, frame, prompts, config).rollouts(), count))


def plain_loop(target, prompt, count, temperature, seed, ends=(EOS,)):
    """Token by token without any cache; argmax of logits / T + g(seed, position, id)."""
    ids = list(prompt)
    for _ in range(count):
        hidden, _ = target(torch.tensor(ids), torch.arange(len(ids)), dense_causal_attend)
        score = target.lm_head(hidden[-1]).double()
        if temperature:
            at, law = torch.tensor(len(ids)), torch.tensor(seed)
            score = score / temperature + ops.gumbel_noise(law, at, torch.arange(len(score)))
        ids.append(int(score.argmax()))
        if ids[-1] in ends:
            break
    return ids


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_texts_equal_a_plain_loop_with_the_reference_draw(temperature):
    target = tiny_target()
    starts = {p.ids for p in PROMPT}
    texts = set()
    for r in take(target, 14, temperatures=(temperature,)):
        ids = r.ids.tolist()
        begin = r.answer.tolist().index(True)
        assert tuple(ids[:begin]) in starts
        assert r.answer.tolist() == [i >= begin for i in range(len(ids))]
        assert r.temperature == temperature
        assert ids == plain_loop(target, ids[:begin], 12, r.temperature, r.seed)
        texts.add(tuple(ids))
    assert (len(texts) == 3) == (temperature == 0.0), "sampled answers to one prompt differ"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_equal_what_an_engines_session_emits(temperature):
    """With the seed and temperature that the rollout carries, speculation on."""
    graph = tiny(EAGLE1, chain(3))
    prompts = [Prompt((1, 2)), Prompt((3, 1, 4, 1, 5, 9, 2, 6)), Prompt((7,))]
    for r in take(graph.target, 9, prompts, temperatures=(temperature,)):
        begin = r.answer.tolist().index(True)
        params = SamplingParams(max_tokens=12, temperature=temperature, seed=r.seed)
        request = graph.session.submit(r.ids[:begin].tolist(), params)
        finish(graph.session)
        assert request.completion().token_ids == r.ids[begin:].tolist()


@pytest.mark.parametrize("features", ["none", "hidden", "all"])
def test_rollouts_carry_true_features(features):
    target = tiny_target()
    layers = (0, 2) if features == "all" else ()
    for r in take(target, 8, features=features, aux_layers=layers):
        if features == "none":
            assert r.hidden is None
            assert r.aux is None
            continue
        hidden, aux = target(r.ids[:-1], torch.arange(len(r.ids) - 1), dense_causal_attend, layers)
        torch.testing.assert_close(r.hidden, hidden, rtol=1e-4, atol=1e-4)
        if features == "all":
            torch.testing.assert_close(r.aux, aux, rtol=1e-4, atol=1e-4)
        else:
            assert r.aux is None


def test_a_conversation_does_not_depend_on_its_company():
    """The i-th conversation is the same one, alone, in another batch, and with long prompts beside it."""
    target = tiny_target()
    long = [*PROMPT, Prompt(tuple(range(40, 64)))]
    settings = {"temperatures": (0.0, 1.0), "prompts": long, "frame": FRAME, "second_turns": 0.5}
    alone = {r.seed: r for r in take(target, 12, batch_size=1, **settings)}
    company = {r.seed: r for r in take(target, 20, batch_size=16, **settings)}
    both = alone.keys() & company.keys()
    assert len(both) >= 8
    for seed in both:
        assert torch.equal(alone[seed].ids, company[seed].ids)
        assert torch.equal(alone[seed].answer, company[seed].answer)
        torch.testing.assert_close(alone[seed].hidden, company[seed].hidden, rtol=1e-4, atol=1e-4)


def test_the_same_seed_gives_the_same_rollouts():
    target = tiny_target()
    first, again, other = ([r.ids.tolist() for r in take(target, 9, seed=s)] for s in (3, 3, 4))
    assert first == again != other


def test_slots_are_refilled_at_once_and_drained_at_the_end():
    """No call has fewer conversations than slots until enough is decoded; every one begun is finished."""
    target = tiny_target()
    config = RolloutConfig(**{**PLAIN, "batch_size": 4, "temperatures": (1.0,)})
    generator = Generator(target, None, PROMPT, config)
    sizes, read = [], generator._target.read

    def counted(spans):
        sizes.append(len(spans))
        return read(spans)

    generator._target.read = counted
    rollouts = list(generator.rollouts(answer_tokens=100))
    full = len(list(itertools.takewhile(lambda n: n == 4, sizes)))
    assert full >= 100 // 4
    assert sizes[full:] == sorted(sizes[full:], reverse=True), "nothing begins after the end is near"
    total = sum(int(r.answer.sum()) for r in rollouts)
    assert 100 <= total < 100 + 4 * 12
    assert total == sum(sizes), "no decoded token is lost: one per conversation and call"


@pytest.mark.parametrize("batch_size", [2, 8])
def test_once_answers_every_prompt_once(batch_size):
    target = tiny_target()
    prompts = [Prompt((5, 6, 7 + i)) for i in range(7)]
    rollouts = take(target, 99, prompts, once=True, batch_size=batch_size)
    assert sorted(tuple(r.ids[:3].tolist()) for r in rollouts) == [p.ids for p in prompts]


def test_long_prompts_are_read_in_pieces_beside_decoding():
    target = tiny_target()
    prompts = [Prompt(tuple(5 + i % 80 for i in range(start, start + 90))) for start in range(6)]
    rollouts = take(target, 8, prompts, batch_size=3, max_length=100, max_answer=5, temperatures=(0.0,))
    for r in rollouts:
        assert r.ids.tolist() == plain_loop(target, r.ids[:90].tolist(), 5, 0.0, 0)


def test_the_target_writes_prompts_and_asks_follow_ups():
    target = tiny_target(seed=1)
    settings = {"max_user": 40, "max_length": 120, "own_prompts": 0.5, "second_turns": 1.0}
    own = follow_ups = 0
    for r in take(target, 48, frame=FRAME, batch_size=24, **settings):
        ids, answer = r.ids.tolist(), r.answer.tolist()
        starts = [i for i in range(1, len(ids)) if answer[i] and not answer[i - 1]]
        if ids[:2] == list(FRAME.open):
            own += 1
            assert tuple(ids[starts[0] - 2 : starts[0]]) == FRAME.ask
            assert ids[starts[0] - 3] in ENDS, "the target ended its user turn"
            assert ids[: starts[0] - 2] == plain_loop(target, ids[:2], 40, 1.0, r.seed, ENDS)
        follow_ups += len(starts) > 1
        assert len(starts) <= 2
        assert answer[-1], "nothing follows the last answer"
        hidden, _ = target(r.ids[:-1], torch.arange(len(ids) - 1), dense_causal_attend)
        torch.testing.assert_close(r.hidden, hidden, rtol=1e-3, atol=1e-3)
    assert own > 0
    assert follow_ups > 0


def test_given_follow_ups_are_asked_after_the_answers():
    target = tiny_target(seed=1)
    prompt = Prompt((5, 6, 7), ((50, 51), (52,)))
    asked = 0
    for r in take(target, 24, [prompt], FRAME, max_answer=30, max_length=90):
        ids, answer = r.ids.tolist(), r.answer.tolist()
        given = [t for t, a in zip(ids[3:], answer[3:], strict=True) if not a]
        turns = [[22, 23, 50, 51, EOS, 20, 21], [22, 23, 52, EOS, 20, 21]]
        assert given in ([], turns[0], turns[0] + turns[1])
        asked = max(asked, len(given))
    assert asked == 13


def test_given_follow_ups_are_asked_after_a_cut_answer_too():
    """The cut answer is closed as the template closes it; that id is not the target's and not marked."""
    target = tiny_target(seed=1)
    frame = dataclasses.replace(FRAME, eos_ids=(EOS,))
    (r,) = take(target, 9, [Prompt((5, 6, 7), ((50, 51),))], frame, once=True, max_answer=2)
    ids, answer = r.ids.tolist(), r.answer.tolist()
    assert EOS not in ids[3:5]
    assert ids[5:13] == [EOS, 22, 23, 50, 51, EOS, 20, 21]
    assert [i for i, marked in enumerate(answer) if marked] == [3, 4, 13, 14]


def test_conversations_that_never_answer_end_the_run():
    with pytest.raises(CacheError, match="conversations in a row ended before an answer began"):
        take(tiny_target(), 1, [], FRAME, own_prompts=1.0, max_user=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": "some"}, "features 'some': must be one of none, hidden, all"),
        ({"compile": "maybe"}, "compile 'maybe'"),
        ({"aux_layers": (1,)}, "aux_layers: stored with features all only"),
        ({"features": "all", "aux_layers": (1, 3)}, "the target has layers 0 to 2"),
        ({"max_length": 3}, "max_length 3: every prompt is longer"),
        ({"own_prompts": 0.5}, "without a chat template"),
        ({"own_prompts": 0.5, "once": True}, "once: the prompts that the target writes never run out"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        take(tiny_target(), 1, **changes)


def test_a_cache_returns_what_was_written(tmp_path):
    rollouts = take(tiny_target(), 6, features="all", aux_layers=(0, 2), temperatures=(0.0, 0.7))
    write_shard(tmp_path, "s0-0000", rollouts, {"target": "abc", "aux_layers": "0,2"})
    cache = RolloutCache(tmp_path)
    assert len(cache.refs) == len(rollouts)
    for ref, r in zip(cache.refs, rollouts, strict=True):
        ids, answer = cache.tokens(ref)
        assert torch.equal(ids, r.ids)
        assert torch.equal(answer, r.answer)
        assert torch.equal(cache.feature(ref, "hidden"), r.hidden)
        assert torch.equal(cache.feature(ref, "aux"), r.aux)
        assert ref.seed == r.seed
        assert ref.temperature == pytest.approx(r.temperature)
        assert cache.shard(ref).target == "abc"
        assert cache.shard(ref).aux_layers == (0, 2)


def test_shards_without_features_seed_or_temperature_are_read(tmp_path):
    rollouts = take(tiny_target(), 3, features="none")
    bare = [type(r)(r.ids, r.answer) for r in rollouts]
    write_shard(tmp_path, "s0-0000", bare, {})
    cache = RolloutCache(tmp_path)
    assert [cache.tokens(ref)[0].tolist() for ref in cache.refs] == [r.ids.tolist() for r in rollouts]
    assert {(ref.seed, ref.temperature) for ref in cache.refs} == {(None, None)}
    assert cache.shard(cache.refs[0]).widths == {}
