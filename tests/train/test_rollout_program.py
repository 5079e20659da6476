"""Which program rollouts call, and that an exported one gives the same texts as the graph."""

import itertools

import pytest
import torch

from speccompile.build.lowering import get_lowering
from speccompile.errors import BuildError
from speccompile.model.programs import TargetStep
from speccompile.train import rollout_program
from speccompile.train.rollout import Generator
from speccompile.train.rollout_program import make_program
from speccompile.train.talk import RolloutConfig
from tests.train.tiny import PROMPT, tiny_target

SETTINGS = {
    "own_prompts": 0.0, "second_turns": 0.0, "batch_size": 4, "max_length": 40, "max_answer": 10,
    "features": "all", "aux_layers": (0, 2),
}  # fmt: skip


class Counting:
    """Compiles nothing, which is quick."""

    compiled = 0

    def compile(self, _program, stem):
        self.compiled += 1
        stem.touch()

    def load(self, stem):
        assert stem.exists()


@pytest.fixture
def lowering(monkeypatch):
    made = Counting()
    monkeypatch.setattr(rollout_program, "get_lowering", lambda _name: made)
    monkeypatch.setattr(rollout_program, "export_target_step", lambda *_: None)
    return made


def make(folder, target=None, *, answer_tokens=10, said=None, **changes):
    config = RolloutConfig(**{**SETTINGS, **changes})
    say = (said if said is not None else []).append
    return make_program(target or tiny_target(), config, answer_tokens, folder, say)


@pytest.mark.parametrize("backend", ["reference", pytest.param("torch", marks=pytest.mark.slow)])
def test_an_exported_program_gives_the_same_rollouts(tmp_path, monkeypatch, backend):
    """As the graph itself; ``torch`` is the machine code that is used, which takes a while to make."""
    monkeypatch.setattr(rollout_program, "get_lowering", lambda _name: get_lowering(backend))
    target, config = tiny_target(), RolloutConfig(**SETTINGS)
    program = make(tmp_path, target, compile="on")
    exported = Generator(target, None, PROMPT, config, program).rollouts()
    eager = Generator(target, None, PROMPT, config).rollouts()
    for one, other in itertools.islice(zip(exported, eager, strict=False), 12):
        assert torch.equal(one.ids, other.ids)
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.aux, other.aux, rtol=1e-4, atol=1e-4)


def test_a_program_is_made_once_per_target_and_settings(tmp_path, lowering):
    said: list[str] = []
    for _ in range(2):
        make(tmp_path, compile="on", said=said)
    assert lowering.compiled == 1
    assert len(said) == 1
    assert ".program" in said[0]
    make(tmp_path, tiny_target(seed=3), compile="on")
    make(tmp_path, compile="on", batch_size=5)
    make(tmp_path, compile="on", aux_layers=(0, 1))
    assert lowering.compiled == 4


def test_a_failed_compilation_leaves_nothing(tmp_path, lowering, monkeypatch):
    def fail(_program, stem):
        stem.touch()
        raise BuildError("no luck")

    monkeypatch.setattr(lowering, "compile", fail)
    with pytest.raises(BuildError, match="no luck"):
        make(tmp_path, compile="on")
    assert not [p for p in (tmp_path / ".program").iterdir() if p.is_dir()]


def test_auto_compiles_for_many_tokens_only(tmp_path, lowering):
    said: list[str] = []
    assert isinstance(make(tmp_path, answer_tokens=49_999, said=said), TargetStep)
    assert "uncompiled: 49999 answer tokens are fewer than 50000" in said[0]
    assert not lowering.compiled
    make(tmp_path, answer_tokens=50_000)
    assert lowering.compiled == 1


def test_without_a_compiler_the_graph_runs_as_it_is(tmp_path, lowering, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    said: list[str] = []
    assert isinstance(make(tmp_path, answer_tokens=10**6, said=said), TargetStep)
    assert "no C++ compiler" in said[0]
    assert isinstance(make(tmp_path, compile="off"), TargetStep)
    with pytest.raises(BuildError, match="CXX"):
        make(tmp_path, compile="on")
    assert not lowering.compiled
