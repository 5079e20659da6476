"""What competes in a benchmark, each in a process of its own.

Separate processes keep peak memory and thread pools apart.  The processes live through the whole run
and answer one prompt at a time, so contenders can take turns and share the machine's weather.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from speccompile.errors import SpeccompileError

Kind = Literal["engine", "transformers"]
_STOP = None


@dataclass(frozen=True, kw_only=True)
class Contender:
    """``path``: engine directory, or the Hugging Face folder for transformers (nothing is
    fetched from a hub).  ``dtype`` bf16|fp16|fp32.  ``speculation`` as in SamplingParams."""

    name: str
    kind: Kind
    path: Path
    dtype: str
    speculation: str = "off"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One generation: ids, wall seconds of the whole call, target calls after the prompt's (rounds)."""

    token_ids: list[int]
    seconds: float
    rounds: int
    round_tokens: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """A prompt as token ids; greedy unless ``temperature`` > 0 (then ``seed`` draws the text)."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


Generate = Callable[[Job], Answer]


def _load_engine(contender: Contender, eos_ids: list[int]) -> Generate:
    from speccompile.runtime.engine import Engine
    from speccompile.runtime.params import SamplingParams

    engine = Engine.load(contender.path)
    del eos_ids  # the engine knows its own

    def generate(job: Job) -> Answer:
        params = SamplingParams(
            max_tokens=job.max_tokens,
            temperature=job.temperature,
            seed=job.seed,
            speculation=contender.speculation,
        )
        began = time.perf_counter()
        done = engine.complete(job.prompt_ids, params)
        seconds = time.perf_counter() - began
        return Answer(
            token_ids=done.token_ids,
            seconds=seconds,
            rounds=done.rounds,
            round_tokens=done.acceptance_length * done.rounds,
        )

    return generate


def _load_transformers(contender: Contender, eos_ids: list[int]) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[contender.dtype]
    model = AutoModelForCausalLM.from_pretrained(contender.path, dtype=dtype, local_files_only=True).eval()

    def generate(job: Job) -> Answer:
        ids = torch.tensor([job.prompt_ids])
        sampling: dict[str, Any] = {"do_sample": job.temperature > 0}
        if job.temperature > 0:
            torch.manual_seed(job.seed)
            sampling.update(temperature=job.temperature, top_k=0)
        began = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job.max_tokens,
                eos_token_id=eos_ids or None,
                pad_token_id=0,
                **sampling,
            )
        seconds = time.perf_counter() - began
        new = out[0, ids.shape[1] :].tolist()
        return Answer(token_ids=new, seconds=seconds, rounds=len(new), round_tokens=len(new))

    return generate


_LOADERS: dict[str, Callable[[Contender, list[int]], Generate]] = {
    "engine": _load_engine,
    "transformers": _load_transformers,
}


def _serve(pipe: Connection, contender: Contender, eos_ids: list[int], threads: int, first: Job) -> None:
    """Process body: load, answer ``first`` with one token (timed as cold start), then answer jobs."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(threads)
    try:
        began = time.perf_counter()
        generate = _LOADERS[contender.kind](contender, eos_ids)
        generate(first)
        pipe.send(time.perf_counter() - began)
        while (job := pipe.recv()) is not _STOP:
            pipe.send(generate(job))
        scale = 1 if sys.platform == "darwin" else 1024
        pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale)
    except SpeccompileError as error:
        pipe.send(error)


class Worker:
    """A running contender.  ``load_s``: start of loading to the first token, libraries imported."""

    def __init__(self, contender: Contender, *, eos_ids: list[int], threads: int, first: Job) -> None:
        self.contender = contender
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, contender, eos_ids, threads, first), daemon=True
        )
        self._process.start()
        theirs.close()
        self.load_s: float = self._receive()

    def answer(self, job: Job) -> Answer:
        self._pipe.send(job)
        return self._receive()

    def close(self) -> int:
        """Stop; returns the process's peak resident bytes."""
        self._pipe.send(_STOP)
        peak: int = self._receive()
        self._process.join()
        return peak

    def _receive(self) -> Any:
        try:
            value = self._pipe.recv()
        except EOFError:
            raise SpeccompileError(
                f"{self.contender.name}: the process ended with code {self._process.exitcode};"
                " its message stands above"
            ) from None
        if isinstance(value, Exception):
            raise value
        return value


def contender_json(contender: Contender) -> dict[str, Any]:
    return {**asdict(contender), "path": str(contender.path)}
