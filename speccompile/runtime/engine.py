"""A loaded engine directory: programs, caches, tokenizer and one session, behind ``generate``.

Everything that knows of files is here; the session below knows none of them.  An engine belongs to
one thread.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speccompile.build.engine_dir import EngineDir, load_engine_dir
from speccompile.build.lowering import get_lowering
from speccompile.build.manifest import Manifest
from speccompile.build.plugin import PLUGIN_NAME, load_plugin
from speccompile.checkpoint.tokenizer import Tokenizer
from speccompile.errors import RequestError
from speccompile.limits import kv_block_shapes
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.programs import KvCache, ProgramSet, allocate_layers
from speccompile.runtime.request import Request
from speccompile.runtime.session import Session
from speccompile.runtime.stats import Completion
from speccompile.tree.table import TreeTable
from speccompile.tree.tree import Tree

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids (used as they are), or a conversation (``[{"role": ..., "content": ...}]``)."""


class Engine:
    """Generates with one engine directory; made by :meth:`load`."""

    def __init__(
        self,
        *,
        path: Path,
        manifest: Manifest,
        tokenizer: Tokenizer,
        programs: ProgramSet,
        kv: KvCache,
        default_tree: Tree | TreeTable,
    ) -> None:
        self.path, self.manifest, self.tokenizer = path, manifest, tokenizer
        self.programs, self.kv = programs, kv
        self.session = Session(
            programs,
            kv,
            vocab_size=manifest.target.vocab_size,
            eos_ids={*manifest.target.eos_token_ids, *tokenizer.eos_ids},
            token_bytes=self._shown_bytes,
            default_tree=default_tree,
        )

    @classmethod
    def load(cls, path: str | Path, *, num_blocks: int | None = None, tuned: bool = True) -> Engine:
        """Load and check an engine directory; raises EngineError.

        ``num_blocks``: size of the KV pool; the default holds ``max_batch_size`` requests of full length.
        ``tuned``: use the engine's tree table, if it has one.
        """
        engine = load_engine_dir(Path(path))
        torch.set_num_threads(engine.manifest.config.threads)
        programs = _load_programs(engine)
        if num_blocks is None:
            num_blocks = programs.limits.default_num_blocks
        return cls(
            path=engine.path,
            manifest=engine.manifest,
            tokenizer=Tokenizer.from_dir(engine.tokenizer),
            programs=programs,
            kv=_allocate_kv(engine.manifest, num_blocks),
            default_tree=(engine.table() if tuned else None) or engine.tree(),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> Any:
        """Complete one prompt (returns a Completion) or several together (returns a list).

        ``params``: for all prompts, or one per prompt.  ``chat`` sends texts through the chat template as
        user messages; conversations always go through it.  Text gets a BOS if the checkpoint asks for
        one, so an empty text is BOS alone, or refused.  Raises RequestError before anything runs.
        """
        single = _is_prompt(prompts)
        each: list[Any] = [prompts] if single else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(each)
        if len(params) != len(each):
            raise RequestError(f"params: {len(params)} for {len(each)} prompts; give one, or one per prompt")
        ids = [self.encode(prompt, chat=chat) for prompt in each]
        requests: list[Request] = []
        try:
            for prompt_ids, prompt_params in zip(ids, params, strict=True):
                requests.append(self.session.submit(prompt_ids, prompt_params))
            while not all(request.done for request in requests):
                self.session.step()
        finally:
            for request in requests:
                self.session.cancel(request)
        done = [request.completion() for request in requests]
        return done[0] if single else done

    def complete(self, prompt_ids: Sequence[int], params: SamplingParams | None = None) -> Completion:
        """Complete one prompt given as token ids.  Raises RequestError, for an empty one too."""
        return self.generate([list(prompt_ids)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, chat: bool = False) -> Stream:
        """Complete one prompt, piece by piece: iterate for text, then read ``completion``."""
        ids = self.encode(prompt, chat=chat)
        return Stream(self.session, self.session.submit(ids, params or SamplingParams()))

    def encode(self, prompt: Prompt, *, chat: bool = False) -> list[int]:
        """Token ids of a prompt, as :meth:`generate` makes them."""
        if isinstance(prompt, str):
            return (
                self.tokenizer.encode_chat([{"role": "user", "content": prompt}])
                if chat
                else self.tokenizer.encode(prompt)
            )
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], Mapping):
            return self.tokenizer.encode_chat(items)
        try:
            return [operator.index(item) for item in items]
        except TypeError as error:
            raise RequestError(f"prompt: token ids must be whole numbers ({error})") from error

    def _shown_bytes(self, token: int) -> bytes:
        return b"" if token in self.tokenizer.special_ids else self.tokenizer.token_bytes(token)


class Stream:
    """Text of one request as it is made; no piece holds half a character or part of a stop string.

    ``close()``, or dropping the stream, cancels a request that is not done.
    """

    def __init__(self, session: Session, request: Request) -> None:
        self._session, self._request = session, request
        self._pieces = _pieces(session, request)

    def __del__(self) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def close(self) -> None:
        """Cancel the request unless it is done."""
        self._session.cancel(self._request)

    @property
    def completion(self) -> Completion:
        """The result; runs to the end first if the text was not read to its end."""
        for _ in self._pieces:
            pass
        return self._request.completion()


def _pieces(session: Session, request: Request) -> Iterator[str]:
    """Steps the session while the request runs.  Others may step it too, even between two pieces."""
    while True:
        done = request.done
        if piece := request.output.take_text():
            yield piece
        if done:
            return
        if not request.done:
            try:
                session.step()
            except BaseException:
                session.cancel(request)
                raise


def _is_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (
        len(prompts) > 0 and isinstance(prompts[0], (int, np.integer, Mapping))
    )


def _load_programs(engine: EngineDir) -> ProgramSet:
    config = engine.manifest.config
    load_plugin(engine.lib / PLUGIN_NAME)
    load, has_head = get_lowering(config.backend).load, engine.manifest.head is not None
    return ProgramSet(
        limits=config.limits,
        target_step=load(engine.program("target_step")),
        accept=load(engine.program("accept")),
        draft_extend=load(engine.program("draft_extend")) if has_head else None,
        draft_step=load(engine.program("draft_step")) if has_head else None,
    )


def _allocate_kv(manifest: Manifest, num_blocks: int) -> KvCache:
    caches: dict[str, list[torch.Tensor]] = {}
    for name, model in (("target", manifest.target), ("draft", manifest.head)):
        if model is not None:
            shapes = kv_block_shapes(model, manifest.config.block_size)
            caches[f"{name}_keys"], caches[f"{name}_values"] = allocate_layers(
                model.num_hidden_layers, num_blocks, shapes, manifest.config.torch_dtype
            )
    return KvCache(num_blocks=num_blocks, **caches)
