"""``bench`` on the tiny engine: real worker processes, figures that add up, errors before anything starts."""

import json

import pytest

from speccompile.bench.contender import Answer, Contender
from speccompile.bench.race import Score
from speccompile.errors import ConfigError


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"turns": [text, "more"]}) + "\n" for text in ("hello", "the fox", "x"))
    )
    return file


def test_engine_and_transformers_in_one_run(invoke, tiny_engine, prompts):
    size = ["--limit", "2", "--max-tokens", "8"]
    baselines = ["--baselines", "ar,transformers", "--model", tiny_engine.target]
    result = invoke("bench", tiny_engine.path, "--prompts", prompts, *size, *baselines, "--json")
    report = json.loads(result.stdout)
    plain, speculative, eager = report["rows"]
    assert report["prompts"] == 2
    assert [plain["speculation"], speculative["speculation"], eager["kind"]] == [
        "off",
        "auto",
        "transformers",
    ]
    assert speculative["same_ids_as_ar"] == 2
    assert plain["tokens"] == speculative["tokens"] == eager["tokens"] > 0
    assert plain["acceptance_length"] == 1.0 <= speculative["acceptance_length"]
    assert speculative["ratio_to_ar"] == pytest.approx(speculative["tokens_per_s"] / plain["tokens_per_s"])
    assert plain["ratio_to_transformers"] == pytest.approx(plain["tokens_per_s"] / eager["tokens_per_s"])
    for row in report["rows"]:
        assert row["peak_memory"] > 2**20
        assert row["load_to_first_token_s"] > 0


def test_wrong_baselines_are_named(invoke, tiny_engine, prompts):
    with pytest.raises(ConfigError, match="'llama' is not known"):
        invoke("bench", tiny_engine.path, "--prompts", prompts, "--baselines", "llama")
    with pytest.raises(ConfigError, match="needs --model"):
        invoke("bench", tiny_engine.path, "--prompts", prompts, "--baselines", "transformers")


def test_scores(tmp_path):
    def score(*answers: Answer) -> Score:
        contender = Contender(name="x", kind="engine", path=tmp_path, dtype="fp32")
        return Score(contender=contender, load_s=0.1, answers=list(answers))

    slow = score(
        Answer(token_ids=[1, 2, 3, 4], seconds=2.0, rounds=4, round_tokens=4),
        Answer(token_ids=[5, 6], seconds=2.0, rounds=2, round_tokens=2),
    )
    fast = score(
        Answer(token_ids=[1, 2, 3, 4], seconds=0.5, rounds=2, round_tokens=4),
        Answer(token_ids=[5, 7], seconds=1.0, rounds=1, round_tokens=2),
    )
    assert slow.tokens_per_s == 1.5
    assert fast.ratio(slow) == pytest.approx(4.0 / 1.5)
    assert fast.median_ratio(slow) == pytest.approx(3.0)
    assert fast.acceptance_length == 2.0
    assert fast.same_ids(slow) == 1
