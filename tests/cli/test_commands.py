"""build, inspect, run and verify on a tiny engine."""

import dataclasses
import json

import pytest

from speccompile.cli import verify as verify_command
from speccompile.errors import ConfigError, EngineError, RequestError
from speccompile.files import sha256
from speccompile.runtime.engine import Engine
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.stats import Completion
from speccompile.verify import Comparison, Difference, compare, perturbed_scores


def json_lines(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def engine(tiny_engine, load_once) -> Engine:
    return load_once(tiny_engine.path)


def test_build_report_and_manifest(tiny_engine, engine):
    report, manifest = tiny_engine.report, engine.manifest
    assert report["config"]["max_seq_len"] == 96 == manifest.config.max_seq_len  # the flag wins
    assert report["config"]["backend"] == "reference"  # from the recipe
    assert report["size"] == sum(item.size for item in manifest.files)
    assert report["peak_memory"] > 50 << 20
    assert {"read", "check", "plugin", "target_step", "draft_step", "smoke", "total"} <= set(manifest.times)
    sources = {item.path: item.sha256 for item in manifest.sources}
    assert sources["model/model.safetensors"] == sha256(tiny_engine.target / "model.safetensors")
    assert sources["draft/config.json"] == sha256(tiny_engine.draft / "config.json")
    assert "model/tokenizer.json" in sources


def test_inspect(tiny_engine, invoke):
    text = invoke("inspect", tiny_engine.path, "--verify").stdout
    assert "eagle1, 1 layer" in text and "├─1:0" in text and "verified: all" in text
    (data,) = json_lines(invoke("inspect", tiny_engine.path, "--json"))
    assert data["config"]["dtype"] == "fp32"
    assert data["tree"]["name"] == "default"
    assert data["verified"] is False


def test_inspect_names_a_damaged_file(tiny_engine, invoke):
    program = tiny_engine.path / "programs" / "accept.pt2"
    good = program.read_bytes()
    program.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    try:
        with pytest.raises(EngineError, match=r"accept\.pt2: changed since"):
            invoke("inspect", tiny_engine.path, "--verify")
    finally:
        program.write_bytes(good)


def test_run_json_fields(tiny_engine, invoke):
    result = invoke("run", tiny_engine.path, "-p", "hello there", "--max-tokens", 9, "--json")
    (answer,) = json_lines(result)
    assert {f.name for f in dataclasses.fields(Completion)} | {"id"} == set(answer)
    assert {"acceptance_by_depth", "ttft_s", "tpot_s", "tokens_per_s", "rounds"} <= set(answer)
    assert len(answer["token_ids"]) == answer["completion_tokens"] == 9
    assert result.stderr == ""


@pytest.mark.parametrize("sampling", [[], ["--temperature", 1.0, "--top-k", 40, "--top-p", 0.9, "--seed", 5]])
def test_run_is_the_same_with_any_tree_or_none(tiny_engine, invoke, sampling):
    base = ["run", tiny_engine.path, "-p", "the quick", "--max-tokens", 24, "--json", *sampling]
    answers = [
        json_lines(invoke(*base, *extra))[0]
        for extra in ([], ["--no-spec"], ["--tree", "chain-3"], ["--tree", "[[0], [1], [1, 0]]"])
    ]
    assert len({tuple(answer["token_ids"]) for answer in answers}) == 1
    assert len({answer["text"] for answer in answers}) == 1


def test_run_temperature_and_seed_reach_speculation(tiny_engine, invoke):
    """Probe S13."""
    base = ["run", tiny_engine.path, "-p", "the quick", "--max-tokens", 12, "--json"]
    flags = ([], ["--temperature", 1, "--seed", 1], ["--temperature", 1, "--seed", 2])
    texts = [json_lines(invoke(*base, *each))[0]["token_ids"] for each in flags]
    assert texts[0] != texts[1] != texts[2] != texts[0]


def test_run_prompts_file(tiny_engine, invoke, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"id": "talk", "turns": ["one", "two"]}\n')
    answers = json_lines(invoke("run", tiny_engine.path, "--prompts", file, "--max-tokens", 4, "--json"))
    assert [answer["id"] for answer in answers] == ["1", "talk/1", "talk/2"]
    assert answers[2]["prompt_tokens"] > answers[1]["prompt_tokens"] + 4


def test_run_streams_what_it_would_print(tiny_engine, invoke):
    base = ["run", tiny_engine.path, "-p", "hello", "--max-tokens", 12, "--chat"]
    streamed, whole = invoke(*base, "--stream"), invoke(*base, "--no-stream")
    assert streamed.stdout == whole.stdout != "\n"
    assert "12 tokens, acceptance length" in whole.stderr


def test_run_stop(tiny_engine, invoke):
    base = ["run", tiny_engine.path, "-p", "the", "--max-tokens", 30, "--json"]
    base += ["--temperature", 1.0, "--seed", 3]
    text = json_lines(invoke(*base))[0]["text"]
    stop = text[5:7]
    (answer,) = json_lines(invoke(*base, "--stop", stop))
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == text[: text.index(stop)]


def test_dialogue_reads_lines_and_survives_a_refused_one(tiny_engine, invoke):
    lines = f"hello\n\n{'too long ' * 200}\nagain\n"
    result = invoke("run", tiny_engine.path, "--chat", "--max-tokens", 3, "--json", stdin=lines)
    first, second = json_lines(result)
    assert "error: prompt has" in result.stderr
    assert second["prompt_tokens"] > first["prompt_tokens"] + 3  # the first turn is still there


def test_run_refusals(tiny_engine, invoke, tmp_path):
    assert invoke("run", tiny_engine.path, "-p", "x", "--prompts", "y").exit_code == 2
    assert invoke("run", tiny_engine.path, "-p", "x", "--no-spec", "--tree", "off").exit_code == 2
    assert invoke("run", tiny_engine.path, "-p", "x", "--json", "--stream").exit_code == 2
    with pytest.raises(RequestError, match="temperature"):
        invoke("run", tiny_engine.path, "-p", "x", "--temperature", -1)
    with pytest.raises(RequestError, match="speculation"):
        invoke("run", tiny_engine.path, "-p", "x", "--tree", "chain-99")
    with pytest.raises(ConfigError, match="cannot be read"):
        invoke("run", tiny_engine.path, "--prompts", tmp_path / "absent")


def test_verify_passes(tiny_engine, invoke, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"turns": ["one", "two"]}\n')
    result = invoke("verify", tiny_engine.path, "--prompts", file, "--max-tokens", 12, "--json")
    (report,) = json_lines(result)
    assert (result.exit_code, report["passed"], report["compared"], report["tokens"]) == (0, True, 4, 48)
    assert [c["temperature"] for c in report["comparisons"]] == [0.0, 1.0, 0.0, 1.0]
    text = invoke("verify", tiny_engine.path, "--prompts", file, "--max-tokens", 4).stdout
    assert text == "4 comparisons, 16 tokens, 0 differ, 0 by a gap above 0.001\n"


@pytest.mark.parametrize(("tolerance", "code"), [(0.5, 0), (0.1, 1)])
def test_verify_fails_above_the_tolerance(tiny_engine, invoke, tmp_path, monkeypatch, tolerance, code):
    difference = Difference(index=3, plain_token=7, speculative_token=8, gap=0.25)
    found = Comparison(
        name="1", temperature=0.0, seed=0, tokens=5, acceptance_length=1.0, difference=difference
    )
    monkeypatch.setattr(verify_command, "compare", lambda *_args: (found, ""))
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n')
    result = invoke("verify", tiny_engine.path, "--prompts", file, "--tolerance", tolerance)
    assert result.exit_code == code
    assert "0.25" in result.stdout


@pytest.mark.parametrize("prompt_len", [1, 40])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_perturbed_scores_are_those_that_draw(engine, prompt_len, temperature):
    params = SamplingParams(max_tokens=4, temperature=temperature, top_k=50, seed=11)
    prompt = [(7 * i) % 300 + 5 for i in range(prompt_len)]
    ids = engine.generate(prompt, params).token_ids
    for count in range(len(ids)):
        scores = perturbed_scores(engine, [*prompt, *ids[:count]], params)
        assert int(scores.argmax()) == ids[count]


def test_compare_reports_the_first_difference(engine, monkeypatch):
    params = SamplingParams(max_tokens=6, temperature=0.0)
    real = engine.complete

    def complete(prompt, params):
        done = real(prompt, params)
        if params.speculation == "off":
            return done
        return dataclasses.replace(done, token_ids=[*done.token_ids[:2], 499, *done.token_ids[3:]])

    monkeypatch.setattr(engine, "complete", complete)
    comparison, _ = compare(engine, "x", [3, 4, 5], params)
    assert comparison.difference is not None
    assert (comparison.difference.index, comparison.difference.speculative_token) == (2, 499)
    scores = perturbed_scores(engine, [3, 4, 5, *real([3, 4, 5], params).token_ids[:2]], params)
    best = scores.topk(2).values
    assert comparison.difference.gap == pytest.approx(float(best[0] - best[1]))


def test_an_empty_prompt_is_refused(tiny_engine, invoke):
    for flags in ([], ["--json"], ["--stream"]):
        with pytest.raises(RequestError, match="prompt is empty"):
            invoke("run", tiny_engine.path, "-p", "", *flags)


def test_a_refused_row_is_named(tiny_engine, invoke, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "hello"}\n{"id": "long", "prompt": "%s"}\n' % ("hello " * 200))
    with pytest.raises(RequestError, match=r"p\.jsonl: row long: prompt has"):
        invoke("run", tiny_engine.path, "--prompts", file, "--max-tokens", "1")


def test_text_that_is_no_unicode_is_refused(tiny_engine, invoke):
    with pytest.raises(RequestError, match="not valid Unicode"):
        invoke("run", tiny_engine.path, "-p", "\ud800")


def test_verify_refuses_a_tolerance_that_is_no_number(tiny_engine, invoke, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "hello"}\n')
    with pytest.raises(ConfigError, match="--tolerance nan"):
        invoke("verify", tiny_engine.path, "--prompts", file, "--tolerance", "nan")
