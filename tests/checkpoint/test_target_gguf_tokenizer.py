"""Tokenizers rebuilt from GGUF metadata, against the tokenizers the metadata came from."""

import io
import json

import pytest
import sentencepiece
from tokenizers import Tokenizer as Core
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from speccompile.checkpoint.target import open_target
from speccompile.checkpoint.tokenizer import Tokenizer
from speccompile.errors import CheckpointError
from tests.checkpoint.builders import CHAT_TEMPLATE, CORPUS, random_llama, train_bpe
from tests.checkpoint.gguf_builders import bpe_keys, write_gguf

TEXTS = ["", "hello there", "  two  spaces\n\n", "naïve 日本 🤗", "<|user|>hi<|end|>", "1234567 it's"]
CHAT = [{"role": "user", "content": "hello"}]


def open_core(tmp_path, **keys):
    write_gguf(tmp_path / "t.gguf", random_llama(**keys.pop("model", {})), **keys)
    return Core.from_str(open_target(tmp_path / "t.gguf").tokenizer.tokenizer_json)


def written(tmp_path, **keys):
    write_gguf(tmp_path / "t.gguf", random_llama(), **keys)
    open_target(tmp_path / "t.gguf").tokenizer.write(tmp_path)
    return tmp_path


def test_gpt2_model_equals_its_origin(tmp_path):
    core, origin = open_core(tmp_path), train_bpe()
    for text in TEXTS:
        assert core.encode(text, add_special_tokens=False).ids == origin.encode(text).ids
        assert core.encode(text).ids == [0, *origin.encode(text).ids]


def test_smollm_splits_digits_as_its_hugging_face_tokenizer(tmp_path):
    core, origin = open_core(tmp_path, **bpe_keys(pre="smollm")), train_bpe()
    origin.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert core.encode(text, add_special_tokens=False).ids == origin.encode(text).ids


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "It'S 12345 ok", ["It", "'S", "Ġ", "123", "45", "Ġok"]),
        ("llama-bpe", "a(b\n\n  c", ["a", "(b", "ĊĊ", "Ġ", "Ġc"]),
        ("gpt-2", "It's 12345 ok", ["It", "'s", "Ġ12345", "Ġok"]),
        ("smollm", "It's 123 ok", ["It", "'s", "Ġ", "1", "2", "3", "Ġok"]),
        ("default", "a,b 12345$", ["a", ",", "b", "Ġ", "123", "45", "$"]),
    ],
)
def test_pre_tokenizers(tmp_path, pre, text, pieces):
    core = open_core(tmp_path, tokenizer__ggml__pre=pre)
    assert [piece for piece, _ in core.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm"])
def test_llama3_prefers_whole_pieces_to_merges(tmp_path, pre):
    keys = bpe_keys(pre=pre)
    tokens = [*keys["tokenizer.ggml.tokens"][:-1], "zqzq"]
    merges = [m for m in keys["tokenizer.ggml.merges"] if m.replace(" ", "") in tokens]
    core = open_core(tmp_path, **{**keys, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges})
    ids = core.encode("zqzq", add_special_tokens=False).ids
    assert (ids == [319]) == (pre == "llama-bpe")


@pytest.mark.parametrize(
    ("keys", "adds"),
    [
        ({"tokenizer__ggml__add_bos_token": False}, False),
        ({"tokenizer__ggml__add_bos_token": None}, False),
        ({"tokenizer__ggml__add_bos_token": None, "tokenizer__ggml__pre": "llama-bpe"}, True),
        ({"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": None}, False),
    ],
)
def test_add_bos(tmp_path, keys, adds):
    assert Tokenizer.from_dir(written(tmp_path, **keys)).adds_bos is adds


def test_written_files_serve_transformers_and_the_runtime(tmp_path):
    folder = written(tmp_path)
    hf, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_dir(folder)
    for text in TEXTS:
        assert ours.encode(text) == hf(text).input_ids
    ids = ours.encode_chat(CHAT)
    assert ids == hf.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ids.count(0) == 1
    assert (ours.bos_id, ours.eos_ids, hf.eos_token) == (0, (1,), "<|end|>")
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


def test_llama3_end_tokens_are_added(tmp_path):
    keys = bpe_keys()
    tokens, types = list(keys["tokenizer.ggml.tokens"]), list(keys["tokenizer.ggml.token_type"])
    tokens[2:5] = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    types[3] = 1
    write_gguf(
        tmp_path / "t.gguf",
        random_llama(),
        **{**keys, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types},
    )
    assert open_target(tmp_path / "t.gguf").config.eos_token_ids == (1, 2, 4)


def train_sentencepiece(prefix):
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=buffer,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue())


def sentencepiece_keys(model, prefix):
    ids = range(model.vocab_size())
    kinds = [
        2 if model.IsUnknown(i) else 3 if model.IsControl(i) else 6 if model.IsByte(i) else 1 for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.IdToPiece(i) for i in ids],
        "tokenizer.ggml.scores": [model.GetScore(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_bos_token": None,
        "tokenizer.ggml.add_space_prefix": None if prefix else False,
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_llama_model_equals_sentencepiece(tmp_path, prefix):
    model = train_sentencepiece(prefix)
    keys = sentencepiece_keys(model, prefix)
    write_gguf(tmp_path / "t.gguf", random_llama(vocab_size=340), **keys)
    open_target(tmp_path / "t.gguf").tokenizer.write(tmp_path)
    ours = Tokenizer.from_dir(tmp_path)
    assert ours.adds_bos
    for text in ["hello there", "  two  spaces\n", "naïve 日本 🤗", "the lazy dog's 1234", *CORPUS]:
        ids = model.encode(text)
        assert ours.encode(text) == [model.bos_id(), *ids]
        assert ours.decode(ids) == model.decode(ids)
        assert b"".join(map(ours.token_bytes, ids)).decode() == (" " if prefix else "") + text


def test_user_defined_tokens_stay_whole_and_visible(tmp_path):
    keys = bpe_keys()
    tokens, types = list(keys["tokenizer.ggml.tokens"]), list(keys["tokenizer.ggml.token_type"])
    tokens[4], types[4] = "<tool>", 4
    folder = written(
        tmp_path, **{**keys, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    )
    ours = Tokenizer.from_dir(folder)
    ids = ours.encode("a<tool>b", add_bos=False)
    assert ids[1] == 4
    assert 4 not in ours.special_ids
    assert ours.decode(ids) == "a<tool>b"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer__ggml__pre": "qwen2"}, "tokenizer.ggml.pre 'qwen2'"),
        ({"tokenizer__ggml__model": "t5"}, "tokenizer.ggml.model 't5'"),
        ({"tokenizer__ggml__merges": ["abc"]}, "merges holds 'abc'"),
        ({"tokenizer__ggml__merges": ["t zz"]}, "merges holds 't zz'"),
        ({"tokenizer__ggml__merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "token_type"),
    ],
)
def test_refusals(tmp_path, keys, message):
    write_gguf(tmp_path / "t.gguf", random_llama(), **keys)
    target = open_target(tmp_path / "t.gguf")
    with pytest.raises(CheckpointError, match=rf"t\.gguf: .*{message}"):
        target.tokenizer  # noqa: B018
