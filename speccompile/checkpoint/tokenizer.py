"""Text to token ids and back at run time, from ``tokenizer.json`` and a chat template, without transformers.

BOS is added in exactly one place: :meth:`Tokenizer.encode` puts it in front when the checkpoint asks for it
and the text does not already start with it; a chat template writes its own.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from speccompile.checkpoint.tensors import read_json, read_text
from speccompile.checkpoint.tokenizer_files import load_tokenizer
from speccompile.errors import CheckpointError, RequestError


class Tokenizer:
    """Wraps a ``tokenizers.Tokenizer``.

    Attributes: ``vocab_size`` (ids, added tokens included), ``bos_id`` (or None), ``eos_ids``, ``adds_bos``
    (whether plain text gets a BOS), ``special_ids`` (ids that never appear in shown text).
    """

    def __init__(
        self, core: tokenizers.Tokenizer, config: Mapping[str, Any], eos_ids: Sequence[int], where: str
    ) -> None:
        # A file may carry the truncation and padding of its training run; prompts must pass whole.
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._config = config
        self._where = where
        self.eos_ids = tuple(eos_ids)
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        added = core.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        prefix = _prefix_id(core)
        self.bos_id = prefix if config.get("bos_token") is None else self._named_id("bos_token")
        # The post-processor decides, as in transformers 5: beside a tokenizer.json it ignores add_bos_token.
        self.adds_bos = prefix is not None and prefix == self.bos_id

    @classmethod
    def from_dir(cls, folder: Path) -> Tokenizer:
        """Reads ``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja`` and the EOS ids of
        ``generation_config.json``; all but the first are optional.  Raises :class:`CheckpointError`.
        """
        core = load_tokenizer(folder / "tokenizer.json")
        config = _optional_json(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        if template.is_file():
            config = {**config, "chat_template": read_text(template)}
        eos = _optional_json(folder / "generation_config.json").get("eos_token_id", [])
        return cls(core, config, eos if isinstance(eos, list) else [eos], str(folder))

    def _named_id(self, key: str) -> int | None:
        text = _content(self._config.get(key))
        return None if text is None else self._core.token_to_id(text)

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Ids of raw text.  ``add_bos`` None follows the checkpoint.  Never makes two BOS, never adds EOS."""
        ids = self._plain_ids(text, "prompt")
        wanted = self.adds_bos if add_bos is None else add_bos
        if not wanted or ids[:1] == [self.bos_id]:
            return ids
        if self.bos_id is None:
            raise RequestError("add_bos: this tokenizer has no BOS token; leave add_bos unset")
        return [self.bos_id, *ids]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        date_string: str | None = None,
    ) -> list[int]:
        """Ids of a conversation (``[{"role": ..., "content": ...}]``) through the chat template."""
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, date_string=date_string
        )
        return self._plain_ids(text, "messages")

    def _plain_ids(self, text: str, field: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{field}: not valid Unicode text ({error})") from error
        return self._core.encode(text, add_special_tokens=False).ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        date_string: str | None = None,
    ) -> str:
        """The conversation as text.  ``date_string`` pins the date that some templates print; else today."""
        tokens = {k: _content(v) for k, v in self._config.items() if k.endswith("_token")}
        variables: dict[str, Any] = {k: v for k, v in tokens.items() if isinstance(v, str)}
        if date_string is not None:
            variables["date_string"] = date_string
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                strftime_now=lambda form: date_string or datetime.datetime.now().strftime(form),
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(f"messages: the chat template refuses them ({error})") from error

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brings a chat template (it may still be damaged)."""
        return self._config.get("chat_template") is not None

    @cached_property
    def _template(self) -> jinja2.Template:
        source = self._config.get("chat_template")
        if isinstance(source, list):
            source = {item.get("name"): item.get("template") for item in source}.get("default")
        if not isinstance(source, str):
            raise RequestError(f"chat: {self._where} has no chat template; send plain text")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            return environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{self._where}: the chat template is not valid ({error})") from error

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids, as the ``tokenizers`` library prints it (incomplete UTF-8 becomes U+FFFD)."""
        return self._core.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one id contributes to the text; empty for an id outside the vocabulary.

        Their concatenation is the text, except that SentencePiece-style tokenizers print no space at the
        very start of a text.
        """
        if token in self._added:
            return self._added[token].encode()
        piece = self._core.id_to_token(token)
        if piece is None:
            return b""
        return _byte_level(piece) if self._is_byte_level else _sentencepiece(piece)

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.dumps(json.loads(self._core.to_str())["decoder"])
        if '"ByteLevel"' in decoder:
            return True
        if '"ByteFallback"' in decoder:
            return False
        raise CheckpointError(
            f"{self._where}: tokenizer.json has neither a ByteLevel nor a ByteFallback decoder"
        )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _prefix_id(core: tokenizers.Tokenizer) -> int | None:
    """The id that the post-processor puts in front of every text, if it does."""
    bare, full = (core.encode("a", add_special_tokens=special).ids for special in (False, True))
    return full[0] if full[:1] != bare[:1] else None


def _content(value: Any) -> Any:
    """Special tokens are stored as a string or as ``{"content": string, ...}``."""
    return value.get("content") if isinstance(value, Mapping) else value


def _byte_table() -> dict[str, int]:
    """GPT-2's stand-ins for the 256 bytes: printable Latin-1 stays, the rest follows from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {**{chr(b): b for b in plain}, **{chr(256 + i): b for i, b in enumerate(rest)}}


_BYTE_OF_CHAR = _byte_table()


def _byte_level(piece: str) -> bytes:
    # A piece with a foreign character was put into the vocabulary as plain text.
    if any(c not in _BYTE_OF_CHAR for c in piece):
        return piece.encode()
    return bytes(_BYTE_OF_CHAR[c] for c in piece)


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, **options: Any) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant text for training; when prompting it prints its body unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
