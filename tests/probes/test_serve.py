"""Probes V09 (every end id of the checkpoint) and V11 (one BOS), through the engine's own encoding."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from speccompile.checkpoint.tokenizer import Tokenizer
from speccompile.runtime.engine import Engine
from speccompile.runtime.params import SamplingParams
from tests.checkpoint.builders import train_bpe
from tests.runtime.fakes import plain
from tests.runtime.test_engine import make_engine

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set text = '<|start|>' + m.role + '<|end|>\n\n' + m.content + '<|eot|>' %}"
    "{% if loop.first %}{{ bos_token }}{% endif %}{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
TEMPLATES = {"<s>": LLAMA2, "<|bos|>": LLAMA3}
TALK = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "there"},
    {"role": "user", "content": "the fox"},
]


def write(folder: Path, bos: str) -> None:
    """A tokenizer that puts ``bos`` before every text by itself, with the template that writes it too."""
    core = train_bpe()
    core.add_special_tokens([AddedToken(t, special=True) for t in (bos, "<|start|>", "<|eot|>")])
    identity = core.token_to_id(bos)
    core.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 $B:1", special_tokens=[(bos, identity)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token="<|end|>")
    fast.chat_template = TEMPLATES[bos]
    fast.save_pretrained(folder)


@pytest.fixture(params=TEMPLATES, ids=["llama2", "llama3"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    write(tmp_path, request.param)
    return make_engine(tokenizer=Tokenizer.from_dir(tmp_path))


def test_chat_starts_with_one_bos(engine: Engine) -> None:
    """V11: the template's BOS, and none from the tokenizer before it."""
    bos = engine.tokenizer.bos_id
    for prompt, chat in ((TALK[:1], False), ("hello", True)):
        ids = engine.encode(prompt, chat=chat)
        assert ids[0] == bos
        assert ids.count(bos) == 1


def test_a_conversation_has_the_bos_of_its_template(engine: Engine) -> None:
    """V11: Llama 2 writes one per user turn, Llama 3 one in all; we add none."""
    ids = engine.encode(TALK)
    text = engine.tokenizer.render_chat(TALK)
    bos = engine.tokenizer.decode([engine.tokenizer.bos_id], skip_special=False)
    assert ids.count(engine.tokenizer.bos_id) == text.count(bos) == (2 if bos == "<s>" else 1)


def test_text_that_holds_its_bos_gets_no_second(engine: Engine) -> None:
    """V11: a rendered chat sent as plain text, and text with and without the BOS text."""
    bos = engine.tokenizer.bos_id
    rendered = engine.tokenizer.render_chat(TALK[:1])
    assert engine.encode(rendered) == engine.encode(TALK[:1])
    text = engine.tokenizer.decode([bos], skip_special=False) + "hello"
    assert engine.encode(text) == engine.encode("hello")
    assert engine.encode(text).count(bos) == 1


@pytest.mark.parametrize("where", ["config", "tokenizer"])
def test_any_end_id_of_the_checkpoint_stops(where: str) -> None:
    """V09: whichever of three end ids the target draws, also inside an accepted block."""
    p = SamplingParams(max_tokens=24)
    expected = plain([1, 2, 3], p, 24)
    stop = next(t for i, t in enumerate(expected) if i > 4 and t not in expected[:i])
    absent = [t for t in range(16) if t not in expected][:2]
    done = make_engine(**{f"{where}_eos": (*absent, stop)}).generate([1, 2, 3], p)
    assert done.token_ids == expected[: expected.index(stop) + 1]
    assert done.finish_reason == "stop"
