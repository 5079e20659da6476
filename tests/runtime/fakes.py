"""A program set over a table language model that obeys the contract and checks its inputs.

The model's state is a rolling hash of all tokens so far; its logits are a fixed random table row of
that state.  The fake caches hold tokens, positions and states, and every call rebuilds what it may
see from the cache through block table, lengths and mask, so a wrong slot, mask, position or
compaction changes the output or fails an assertion.  Everything is float32 / int64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speccompile.limits import Limits
from speccompile.runtime.kv_blocks import NULL_BLOCK
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.programs import KvCache, ProgramSet
from speccompile.runtime.session import Session
from speccompile.tree.named import OFF
from speccompile.tree.tree import Tree

VOCAB = 16
EMPTY = -1.0
_STATES = 65521
_TABLE = np.random.default_rng(5).normal(0.0, 2.0, (997, VOCAB))


def state_of(tokens: Sequence[int], state: int = 0) -> int:
    for token in tokens:
        state = (state * 31 + token * 7 + 1) % _STATES
    return state


def logits_of(state: int) -> np.ndarray:
    return _TABLE[state % len(_TABLE)]


@lru_cache(maxsize=10000)
def gumbel(seed: int, position: int) -> np.ndarray:
    return np.random.default_rng([seed % 2**63, position]).gumbel(size=VOCAB)


def draw(logits: np.ndarray, p: Any, seed: int, position: int) -> int:
    """Plain reference of the draw: temperature, top-k, top-p, min-p, then Gumbel-max."""
    if p.temperature == 0:
        return int(np.argmax(logits))
    scaled = logits / p.temperature
    order = np.argsort(-scaled, kind="stable")
    keep = order[: p.top_k] if p.top_k else order
    weight = np.exp(scaled[keep] - scaled[keep[0]])
    above = (np.cumsum(weight) - weight) / weight.sum()
    keep = keep[((above < p.top_p) | (p.top_p >= 1)) & (weight >= p.min_p)]
    keep = keep if len(keep) else order[:1]
    noisy = scaled + gumbel(seed, position)
    return int(keep[np.argmax(noisy[keep])])


def plain(prompt: Sequence[int], params: SamplingParams, count: int, seed: int | None = None) -> list[int]:
    """``count`` tokens of the fake model by the definition, without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        chosen = params.seed if seed is None else seed
        tokens.append(draw(logits_of(state_of(tokens)), params, chosen or 0, len(tokens)))
    return tokens[len(prompt) :]


Ranker = Callable[[np.ndarray, int, int], np.ndarray]
"""Head behaviour: (scores of the true next token, state, position) -> all ids, best candidate first."""


def oracle(scores: np.ndarray, _state: int, _position: int) -> np.ndarray:
    return np.argsort(-scores, kind="stable")


def anti(scores: np.ndarray, state: int, position: int) -> np.ndarray:
    return oracle(scores, state, position)[::-1]


def second(scores: np.ndarray, state: int, position: int) -> np.ndarray:
    """The right candidate is always rank 1."""
    order = oracle(scores, state, position)
    return order[[1, 0, *range(2, VOCAB)]]


def noisy(scores: np.ndarray, state: int, position: int) -> np.ndarray:
    """Right about half of the time, by a rule that depends on everything read so far."""
    return np.argsort(-(scores + np.random.default_rng([state, position]).normal(0, 2.0, VOCAB)))


def always(token: int) -> Ranker:
    def rank(scores: np.ndarray, state: int, position: int) -> np.ndarray:
        order = anti(scores, state, position)
        return np.array([token, *(t for t in order if t != token)])

    return rank


class FakePrograms:
    """The four programs.  ``calls`` lists (program, rows) in call order; ``accept`` is what it returned."""

    def __init__(self, limits: Limits, head: Ranker | None) -> None:
        self.limits, self.head = limits, head
        self.calls: list[tuple[str, int]] = []
        self.num_blocks = limits.default_num_blocks

    def program_set(self) -> ProgramSet:
        return ProgramSet(
            limits=self.limits,
            target_step=self.target_step,
            accept=self.accept,
            draft_extend=self.draft_extend if self.head else None,
            draft_step=self.draft_step if self.head else None,
        )

    def kv(self, num_blocks: int | None = None) -> KvCache:
        """Caches with [state or token, position] in channels 0 and 1 of one head."""
        blocks, size = num_blocks or self.num_blocks, self.limits.block_size
        self.cache = KvCache(
            num_blocks=blocks,
            target_keys=[torch.full((blocks, 1, 2, size), EMPTY)],
            target_values=[torch.full((blocks, 1, size, 2), EMPTY)],
            draft_keys=[torch.full((blocks, 1, 2, size), EMPTY)],
            draft_values=[torch.full((blocks, 1, size, 2), EMPTY)],
        )
        return self.cache

    def check_guard(self) -> None:
        """Nothing was ever written to the block that is never handed out."""
        for tensor in (*self.cache.target_keys, *self.cache.draft_values):
            assert (tensor[NULL_BLOCK] == EMPTY).all()

    # Slots ----------------------------------------------------------------------------------

    def _locate(self, table: Any, slots: Any) -> tuple[np.ndarray, np.ndarray]:
        slots, table = np.asarray(slots, np.int64), np.asarray(table)
        assert ((slots >= 0) & (slots < self.limits.max_seq_len)).all(), "a slot is past max_seq_len"
        blocks = table[slots // self.limits.block_size]
        assert (blocks != NULL_BLOCK).all(), "a slot lies in a block that was not given to the request"
        return blocks, slots % self.limits.block_size

    def _write(self, kv: tuple, table: Any, slots: Any, items: Sequence[tuple[float, float]]) -> None:
        """Store (value, position) pairs; a slot holds the same pair as key and as value."""
        blocks, offsets = self._locate(table, slots)
        kv[0][0].numpy()[blocks, 0, :, offsets] = items
        kv[1][0].numpy()[blocks, 0, offsets, :] = items

    def _read(self, kv: tuple, table: Any, slots: Any) -> np.ndarray:
        """(value, position) pairs [slots, 2] by position."""
        blocks, offsets = self._locate(table, slots)
        keys, values = kv[0][0].numpy()[blocks, 0, :, offsets], kv[1][0].numpy()[blocks, 0, offsets, :]
        assert (keys == values).all() and (keys[:, 0] != EMPTY).all(), "a slot was read before it was written"
        return values.astype(np.int64)

    def _visible(self, layout: tuple, kv: tuple) -> list[list[int]]:
        """For each row the values it sees in order of position; asserts positions 0 .. its own, each once."""
        assert [t.dtype for t in layout] == [torch.int64] * 2 + [torch.int32] * 4
        position, mask, cu, prefix, start, table = (t.numpy() for t in layout)
        assert mask.shape == (len(position), self.limits.mask_words)
        assert table.shape == (len(prefix), self.limits.blocks_per_request)
        assert cu[0] == 0 and cu[-1] <= len(position) and len(cu) == len(prefix) + 1 == len(start) + 1
        assert 1 <= len(position) <= self.limits.max_rows and len(prefix) <= self.limits.max_batch_size
        bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), axis=1, bitorder="little")
        out: list[list[int]] = []
        for r in range(len(prefix)):
            for row in range(cu[r], cu[r + 1]):
                suffix = np.flatnonzero(bits[row])
                assert suffix[-1] == start[r] + row - cu[r], "a row sees itself and nothing later"
                seen = self._read(kv, table[r], np.concatenate([np.arange(prefix[r]), prefix[r] + suffix]))
                seen = seen[np.argsort(seen[:, 1])]
                assert (seen[:, 1] == np.arange(position[row] + 1)).all()
                out.append(seen[:, 0].tolist())
        return out + [[]] * (len(position) - len(out))

    def _fill(self, layout: tuple, kv: tuple, value: Sequence[int]) -> None:
        position, _, cu, prefix, start, table = (t.numpy() for t in layout)
        for r in range(len(prefix)):
            rows = range(cu[r], cu[r + 1])
            slots = prefix[r] + start[r] + np.arange(len(rows))
            self._write(kv, table[r], slots, [(value[row], position[row]) for row in rows])

    # Programs -------------------------------------------------------------------------------

    def target_step(self, token: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        layout, logit_row, kv = rest[:6], rest[6], rest[7:]
        assert token.dtype == logit_row.dtype == torch.int64
        assert min(len(token), len(logit_row)) >= self.limits.min_target_rows
        assert ((token >= 0) & (token < VOCAB)).all()
        self.calls.append(("target_step", len(token)))
        self._fill(layout, kv, token.tolist())
        states = [state_of(seen) for seen in self._visible(layout, kv)]
        logits = np.stack([logits_of(states[row]) for row in logit_row.tolist()])
        return torch.tensor(logits, dtype=torch.float32), torch.tensor(states, dtype=torch.float32)[:, None]

    def draft_extend(self, token: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        layout, (feature, feature_row, out_row, temperature, seed), kv = rest[:6], rest[6:11], rest[11:]
        self.calls.append(("draft_extend", len(token)))
        states = feature[feature_row, 0].long().tolist()
        after = [state_of([t], state) for state, t in zip(states, token.tolist(), strict=True)]
        self._fill(layout, kv, after)
        return self._head_outputs(layout, kv, after, out_row.tolist(), temperature, seed)

    def draft_step(self, *args: Any) -> tuple[Tensor, Tensor]:
        layout, (hidden, topk, parent_row, rank, temperature, seed), kv = args[:6], args[6:12], args[12:]
        self.calls.append(("draft_step", len(parent_row)))
        token = topk[parent_row, rank].tolist()
        states = hidden[parent_row, 0].long().tolist()
        after = [state_of([t], state) for state, t in zip(states, token, strict=True)]
        self._fill(layout, kv, after)
        return self._head_outputs(layout, kv, after, list(range(len(after))), temperature, seed)

    def _head_outputs(
        self,
        layout: tuple,
        kv: tuple,
        after: list[int],
        out_row: list[int],
        temperature: Tensor,
        seed: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Candidates from the state after each pair; the pairs seen must chain up to that state."""
        visible = self._visible(layout, kv)
        assert len(layout[0]) == layout[2][-1], "only target_step is padded"
        assert self.head is not None and len(out_row) == len(temperature) == len(seed)
        topk = []
        for index, row in enumerate(out_row):
            chain = np.array(visible[row])
            assert chain[-1] == after[row]
            steps = (chain[1:] - chain[:-1] * 31 - 1) % _STATES  # 7 * token, see state_of()
            assert (steps % 7 == 0).all() and (steps < 7 * VOCAB).all(), "the head's KV is not one text"
            scores, position = logits_of(after[row]).copy(), int(layout[0][row]) + 2
            heat = float(temperature[index])
            if heat > 0:
                scores = scores / heat + gumbel(int(seed[index]), position)
            topk.append(self.head(scores, after[row], position)[: self.limits.draft_topk])
        hidden = torch.tensor([after[row] for row in out_row], dtype=torch.float32)[:, None]
        return hidden, torch.tensor(np.stack(topk))

    def accept(self, logits: Tensor, token: Tensor, parent: Tensor, position: Tensor, *rest: Any) -> tuple:
        cu, prefix, table, temperature, top_k, top_p, min_p, seed, *kv = rest
        assert len(logits) == len(token) == len(parent) == len(position) >= int(cu[-1])
        assert len(temperature) == len(prefix) == len(table) == len(cu) - 1
        self.calls.append(("accept", len(token)))
        drawn, paths, lengths = [0] * len(token), [], []
        for r in range(len(prefix)):
            first, last = int(cu[r]), int(cu[r + 1])
            p = SamplingParams(
                temperature=float(temperature[r]),
                top_k=int(top_k[r]),
                top_p=float(top_p[r]),
                min_p=float(min_p[r]),
            )
            for row in range(first, last):
                drawn[row] = draw(logits[row].double().numpy(), p, int(seed[r]), int(position[row]) + 1)
            path = self._walk(drawn, token.tolist(), parent.tolist(), first, last)
            root, size = int(prefix[r]), last - first
            moved = self._read(kv, table[r], [root + row - first for row in path])
            # What was rejected must never be read again.
            kept = [*moved.tolist(), *[(EMPTY, EMPTY)] * (size - len(path))]
            self._write(kv, table[r], root + np.arange(size), kept)
            lengths.append(len(path))
            paths.append(path + path[-1:] * (self.limits.max_tree_depth + 1 - len(path)))
        return torch.tensor(drawn), torch.tensor(paths), torch.tensor(lengths)

    @staticmethod
    def _walk(drawn: list[int], token: list[int], parent: list[int], first: int, last: int) -> list[int]:
        path = [first]
        assert parent[first] == -1
        for row in range(first + 1, last):
            assert first <= parent[row] < row
            if parent[row] == path[-1] and token[row] == drawn[path[-1]]:
                path.append(row)
        return path


def token_bytes(token: int) -> bytes:
    return bytes([ord("a") + token])


def limits(**changes: int) -> Limits:
    values = {
        "max_batch_size": 6,
        "max_seq_len": 96,
        "max_rows": 160,
        "max_tree_depth": 6,
        "draft_topk": 4,
        "block_size": 4,
        "min_target_rows": 2,
    }
    return Limits(**{**values, **changes})


def make_session(
    head: Ranker | None = oracle, *, tree: Tree = OFF, num_blocks: int | None = None, **options: Any
) -> tuple[Session, FakePrograms]:
    """A session over fresh fakes; ``options`` are limits or arguments of Session."""
    sizes = {key: options.pop(key) for key in list(options) if key in Limits.__dataclass_fields__}
    fake = FakePrograms(limits(**sizes), head)
    arguments = {"vocab_size": VOCAB, "eos_ids": (), "token_bytes": token_bytes, **options}
    return Session(fake.program_set(), fake.kv(num_blocks), default_tree=tree, **arguments), fake


def finish(session: Session) -> None:
    """Step until nothing is left."""
    for _ in range(2000):
        if session.idle:
            return
        session.step()
    raise AssertionError("the session did not come to an end")
