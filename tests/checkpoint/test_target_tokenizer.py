"""The runtime tokenizer against transformers, BOS counting, chat templates, bytes of single tokens."""

import json

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Core
from transformers import AutoTokenizer

from speccompile.checkpoint.tokenizer import Tokenizer
from speccompile.errors import CheckpointError, RequestError
from tests.checkpoint.builders import edit_json, train_bpe, write_tokenizer

TEXTS = ["", "hello there", "  two  spaces\n\n", "naïve 日本 🤗", "<|user|>hi<|end|>", "1234567"]
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello\nthere"}]


def bos_bpe():
    core = train_bpe()
    core.post_processor = processors.TemplateProcessing(
        single="<s>:0 $A:0", pair="<s>:0 $A:0 <s>:1 $B:1", special_tokens=[("<s>", 0)]
    )
    return core


@pytest.mark.parametrize("make", [train_bpe, bos_bpe])
@pytest.mark.parametrize("flag", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_equals_auto_tokenizer(tmp_path, make, flag):
    write_tokenizer(tmp_path, make())
    edit_json(tmp_path / "tokenizer_config.json", **flag)
    hf, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_dir(tmp_path)
    for text in TEXTS:
        ids = hf(text).input_ids
        assert ours.encode(text) == ids
        for skip in (False, True):
            assert ours.decode(ids, skip) == hf.decode(ids, skip_special_tokens=skip)
    assert ours.bos_id == hf.bos_token_id == 0
    assert ours.vocab_size == len(hf)
    assert ours.special_ids == set(hf.all_special_ids) | {2, 3, 4}


def test_add_bos_is_explicit_and_never_doubles(tmp_path):
    write_tokenizer(tmp_path, bos_bpe())
    ours = Tokenizer.from_dir(tmp_path)
    assert ours.adds_bos
    for text in ("<s>hello", "hello"):
        assert ours.encode(text).count(0) == ours.encode(text, add_bos=True).count(0) == 1
    assert ours.encode("hello", add_bos=False).count(0) == 0
    assert ours.encode("") == [0]


def test_bos_is_found_without_tokenizer_config(tmp_path):
    bos_bpe().save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_dir(tmp_path)
    assert (ours.bos_id, ours.adds_bos, ours.eos_ids) == (0, True, ())
    train_bpe().save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_dir(tmp_path)
    assert (ours.bos_id, ours.adds_bos) == (None, False)
    with pytest.raises(RequestError, match="add_bos"):
        ours.encode("hello", add_bos=True)


@pytest.mark.parametrize("prompt", [False, True])
def test_chat_equals_transformers_and_has_one_bos(tmp_path, prompt):
    hf = write_tokenizer(tmp_path, bos_bpe())
    ids = Tokenizer.from_dir(tmp_path).encode_chat(CHAT, add_generation_prompt=prompt)
    assert ids == hf.apply_chat_template(CHAT, add_generation_prompt=prompt)["input_ids"]
    assert ids.count(0) == 1


def with_template(folder, template):
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return AutoTokenizer.from_pretrained(folder), Tokenizer.from_dir(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}\n  {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{%- if date_string is defined %}{{ date_string }}{% else %}none{% endif %}",
        "{{ eos_token }}{{ bos_token }}{{ pad_token is defined }}",
    ],
)
def test_template_helpers_render_as_in_transformers(tmp_path, template):
    hf, ours = with_template(tmp_path, template)
    chat = [{"role": "user", "content": "<é&'>"}, {"role": "assistant", "content": "b"}]
    assert ours.render_chat(chat) == hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_date_can_be_pinned(tmp_path):
    _, ours = with_template(tmp_path, "{{ strftime_now('%Y') }} {{ date_string is defined }}")
    assert ours.render_chat(CHAT, date_string="26 Jul 2024") == "26 Jul 2024 True"
    year, defined = ours.render_chat(CHAT).split()
    assert int(year) > 2020
    assert defined == "False"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
    ],
)
def test_template_errors_name_the_field(tmp_path, template, message):
    _, ours = with_template(tmp_path, template)
    with pytest.raises(RequestError, match=f"messages: .*{message}"):
        ours.encode_chat(CHAT)


def test_missing_and_broken_templates(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match="not valid"):
        Tokenizer.from_dir(tmp_path).encode_chat(CHAT)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_dir(tmp_path).encode_chat(CHAT)
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "hello"}]
    edit_json(tmp_path / "tokenizer_config.json", chat_template=named)
    assert Tokenizer.from_dir(tmp_path).render_chat(CHAT) == "hello"


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    core = train_bpe()
    core.enable_truncation(2)
    core.enable_padding(length=50)
    core.save(str(tmp_path / "tokenizer.json"))
    text = "the quick brown fox"
    assert Tokenizer.from_dir(tmp_path).encode(text) == train_bpe().encode(text).ids


def test_eos_ids_come_from_generation_config(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    assert Tokenizer.from_dir(tmp_path).eos_ids == (1, 3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert Tokenizer.from_dir(tmp_path).eos_ids == (1,)


def test_bytes_of_byte_level_tokens(tmp_path):
    core = train_bpe()
    core.add_tokens([AddedToken("<tool é>", special=False)])
    core.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_dir(tmp_path)
    for text in [*TEXTS, "a<tool é>b", "".join(chr(i) for i in range(1, 400))]:
        ids = ours.encode(text)
        assert b"".join(map(ours.token_bytes, ids)) == text.encode()
    assert {ours.token_bytes(i) for i in range(5, 261)} == {bytes([b]) for b in range(256)}
    assert ours.token_bytes(ours.vocab_size) == b""


def sentencepiece_core():
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
        "日",
    ]
    vocab = {p: i for i, p in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    core = Core(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<s>", "</s>"])
    return core


def test_bytes_of_sentencepiece_tokens(tmp_path):
    sentencepiece_core().save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_dir(tmp_path)
    for text in ["ab a", "b 日 é🤗", "a  b"]:
        ids = ours.encode(text)
        assert b"".join(map(ours.token_bytes, ids)).decode() == " " + text
        assert ours.decode(ids) == text
    assert ours.token_bytes(1) == b"<s>"
    assert ours.token_bytes(3 + 0xF0) == b"\xf0"


def test_other_decoders_are_refused(tmp_path):
    core = train_bpe()
    core.decoder = decoders.WordPiece()
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="ByteLevel"):
        Tokenizer.from_dir(tmp_path).token_bytes(9)


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(tmp_path)
