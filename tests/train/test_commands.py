"""rollout, train and eval-draft from the command line, on a tiny tied single-file target (probe R11)."""

import json

import pytest
from click.testing import CliRunner

from speccompile.checkpoint.heads import open_head
from speccompile.checkpoint.target import open_target
from speccompile.cli.main import cli
from speccompile.errors import ConfigError, SpeccompileError
from speccompile.tree.named import resolve_tree
from tests.checkpoint.builders import write_llama, write_tokenizer

TRAIN = "--steps 4 --draft-vocab-size 64 --batch-tokens 128 --dtype fp32 --held-out-percent 30 --lr 1e-3"


@pytest.fixture
def folder(tmp_path):
    write_llama(tmp_path / "target", bos_token_id=0, eos_token_id=1, tie_word_embeddings=True)
    write_tokenizer(tmp_path / "target")
    assert [p.name for p in (tmp_path / "target").glob("*.safetensors")] == ["model.safetensors"]
    prompts = [json.dumps({"prompt": f"the quick brown fox number {i}"}) for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    return tmp_path


def call(folder, line):
    words = [word.replace("@", f"{folder}/") for word in line.split()]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def rollouts(folder):
    sizes = "--batch-size 24 --max-answer 12 --max-length 60 --dtype fp32 --own-prompts 0 --temperatures 0"
    line = f"rollout --model @target --prompts @prompts.jsonl --output @cache {sizes}"
    return call(folder, f"{line} --answer-tokens 200 --json")


def test_rollout_train_and_measure(folder):
    summary = json.loads(rollouts(folder).stdout)
    assert summary["answer_tokens"] >= 200
    run = call(folder, f"train --model @target --data @cache --output @head {TRAIN} --json")
    records = [json.loads(line) for line in run.stdout.splitlines()]
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3, 4]
    assert records[-1]["kind"] == "eval"
    head = open_head(folder / "head", open_target(folder / "target").config)
    assert head.config.draft_vocab_size == 64
    options = "--dtype fp32 --depth 2 --tree [[0],[1]] --best-nodes 3 --write-tree @best.json"
    line = f"eval-draft --model @target --draft @head --data own=@cache {options}"
    measured = json.loads(call(folder, f"{line} --json").stdout)
    (group,) = measured["groups"]
    assert (group["data"], group["law"], group["texts"] > 0) == ("own", "greedy", True)
    assert [t["name"] for t in measured["trees"]] == ["chain-1", "chain-2", "custom", "best-3"]
    assert all(1 <= t["length"] <= 3 for t in group["trees"])
    assert json.loads((folder / "best.json").read_text()) == measured["trees"][-1]
    assert resolve_tree(folder / "best.json").num_nodes <= 3
    assert "chain-2" in call(folder, line).stdout
    with pytest.raises(ConfigError, match="no answer in own can be replayed"):
        call(folder, f"{line} --sampling sampled")


def test_a_finished_run_is_not_overwritten_but_resumes(folder):
    rollouts(folder)
    line = f"train --model @target --data @cache --output @head {TRAIN} --json"
    call(folder, line)
    with pytest.raises(ConfigError, match="already holds a run"):
        call(folder, line)
    again = call(folder, f"{line} --resume")
    assert again.stdout == ""
    assert "already finished" in again.stderr
    with pytest.raises(ConfigError, match="no checkpoint to resume; start without --resume"):
        call(folder, line.replace("@head", "@other") + " --resume")


def test_training_on_prompts_rolls_them_out_first(folder):
    line = f"train --model @target --data @prompts.jsonl --output @head {TRAIN} --json --answer-tokens"
    call(folder, f"{line} 100")
    head = folder / "head"
    assert list((head / "rollouts").glob("*.safetensors"))
    for name in ("model.safetensors", "config.json", "train_state.pt"):
        (head / name).unlink()
    with pytest.raises(
        ConfigError, match="rollouts: holds rollouts that were cut short, or of other prompts"
    ):
        call(folder, f"{line} 200")
    call(folder, f"{line} 100")
    assert (head / "model.safetensors").is_file()


@pytest.mark.parametrize("output", ["@target", "@cache", "@prompts.jsonl"])
def test_a_run_writes_over_nothing(folder, output):
    rollouts(folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=r"would write over it|is a file"):
        call(folder, f"train --model @target --data @cache --output {output} {TRAIN}")
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_a_resumed_run_keeps_its_target_and_data(folder):
    rollouts(folder)
    line = f"train --model @target --data @cache --output @head {TRAIN} --json"
    call(folder, line)
    write_llama(folder / "other", seed=5, bos_token_id=0, eos_token_id=1, tie_word_embeddings=True)
    write_tokenizer(folder / "other")
    with pytest.raises(SpeccompileError, match=r"another target|wrong target"):
        call(folder, line.replace("@target", "@other") + " --resume")
    (folder / "cache" / "s0-0000.safetensors").rename(folder / "cache" / "s1-0000.safetensors")
    sizes = "--batch-size 24 --max-answer 6 --max-length 60 --dtype fp32 --own-prompts 0 --temperatures 0"
    call(
        folder, f"rollout --model @target --prompts @prompts.jsonl --output @less {sizes} --answer-tokens 60"
    )
    with pytest.raises(ConfigError, match=r"s0-0000\.safetensors is not the shard which that run read"):
        call(folder, line.replace("@cache", "@less") + " --resume")


@pytest.mark.parametrize(
    "flag",
    ["--lr inf", "--warmup 5", "--weight-decay nan", "--feature-weight -1", "--max-length 1", "--seed -1",
     "--feature-cache @f --feature-cache-gib nan", "--feature-cache @prompts.jsonl"],
)  # fmt: skip
def test_senseless_numbers_are_refused_before_anything_is_written(folder, flag):
    rollouts(folder)
    with pytest.raises(ConfigError):
        call(folder, f"train --model @target --data @cache --output @head {TRAIN} {flag}")
    assert not (folder / "head").exists()


def test_once_answers_each_prompt_and_stops(folder):
    line = "rollout --model @target --prompts @prompts.jsonl --output @cache --once --own-prompts 0"
    summary = json.loads(call(folder, f"{line} --max-answer 4 --dtype fp32 --json").stdout)
    assert summary["sequences"] == 12


def test_rolling_out_twice_with_one_seed_is_refused(folder):
    rollouts(folder)
    with pytest.raises(ConfigError, match="already holds shards s0"):
        rollouts(folder)
