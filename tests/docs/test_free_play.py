"""The pool to play with: its model in JavaScript does what the memory manager does, and the page shows what it did."""

import json
import random
import shutil
import subprocess

import numpy as np
import pytest

from pagedkv import OutOfBlocksError, PagedKVCache

from .test_step_by_step import choose, no_errors, page, scripts, text_of

__all__ = ["no_errors", "page"]  # fixtures

NUM_BLOCKS, BLOCK_SIZE, WORDS = 8, 4, ["the", "cat", "a"]


def operations(seed, count=60):
    """Calls (operation, names and words) of which no sequence is longer than the pool."""
    rng, lengths, made = random.Random(seed), {}, []

    def words(most):
        """Mostly the beginning of one text, so that there is much to find."""
        text = (WORDS * 5)[: rng.randint(1, most)]
        if rng.random() < 0.4:
            text[rng.randrange(len(text))] = rng.choice(WORDS)
        return text

    for number in range(count):
        kinds = ("add", "add", "append", "append", "fork", "release", "release")
        kind = rng.choice((*kinds, "reset" if number % 9 == 0 else "add"))
        name = rng.choice([*lengths]) if lengths else None
        if (kind in ("add", "fork") and len(lengths) > 4) or (name is None and kind not in ("add", "reset")):
            continue
        new = words(14) if kind == "add" else words(5) if kind == "append" else []
        made.append((kind, f"s{number}" if kind == "add" else name, f"s{number}" if kind == "fork" else None, new))
        if kind == "release":
            del lengths[name]
        elif kind in ("add", "fork"):
            lengths[f"s{number}"] = 0
    return made


class Cache:
    """The package's own pool, told the same."""

    def __init__(self):
        sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_dim": 8}
        self.cache = PagedKVCache(num_layers=1, num_blocks=NUM_BLOCKS, max_seqs=64, **sizes)
        self.seqs = {}

    def play(self, kind, name, other, words):
        """Whether it was possible, or how many words were found, and the pool then."""
        ids = [WORDS.index(word) for word in words]
        if kind in ("append", "fork", "release") and name not in self.seqs:
            return None  # it was never added, for want of room
        done = True
        try:
            if kind == "add":
                self.seqs[name], done = self.cache.add(ids)
            elif kind == "append":
                self.cache.append([self.seqs[name]], len(ids), ids)
            elif kind == "fork":
                [self.seqs[other]] = self.cache.fork([self.seqs[name]])
            elif kind == "release":
                self.cache.free([self.seqs.pop(name)])
            else:
                self.cache.reset()
        except OutOfBlocksError:
            done = False
        if self.seqs:
            self.cache.commit([*self.seqs.values()])
        return [done, self.state()]

    def state(self):
        table, refs = self.cache, self.cache.pool.ref_counts
        found = table.pool._prefix_cache
        findable = found.is_findable(np.arange(NUM_BLOCKS)).tolist()
        tokens = found.tokens.reshape(NUM_BLOCKS, BLOCK_SIZE).tolist()
        tables = {name: table.block_tables([seq])[0].tolist() for name, seq in self.seqs.items()}
        cached = [[WORDS[token] for token in tokens[block]] if findable[block] else [] for block in range(NUM_BLOCKS)]
        return {"tables": tables, "refs": refs.tolist(), "cached": cached, "free": self.cache.num_free}


PLAY = """(calls) => { const pool = new PoolModel(%d, %d); return calls.map(([kind, name, other, words]) => {
  if (["append", "fork", "release"].includes(kind) && !pool.sequences.has(name)) return null;
  const done = { add: () => pool.add(name, words), append: () => pool.append(name, words),
    fork: () => pool.fork(name, other), release: () => pool.release(name), reset: () => pool.reset() }[kind]();
  const tables = Object.fromEntries([...pool.sequences].map(([name, each]) => [name, [...each.blocks]]));
  const refs = pool.blocks.map((block) => block.refs), cached = pool.blocks.map((block) => block.words);
  return [done === undefined ? true : done ?? false, { tables, refs, cached, free: pool.numFree }];
}); }"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the model, and is not here")
def test_the_model_is_the_memory_manager():
    calls = [operations(seed) for seed in range(25)]
    program = f"{scripts()['pool_model.js']}; const play = {PLAY % (NUM_BLOCKS, BLOCK_SIZE)};"
    program += f"console.log(JSON.stringify({json.dumps(calls)}.map(play)))"
    run = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    for seed, (made, played) in enumerate(zip(calls, json.loads(run.stdout), strict=True)):
        cache = Cache()
        for call, got in zip(made, played, strict=True):
            assert got == cache.play(*call), (seed, call)


# -- the page
def news(page):
    return text_of(page, "#pool-play .telling p").split("\n")


def click(page, words):
    page.run(
        f"[...document.querySelectorAll('#pool-play button')].find((each) => each.textContent === {words!r}).click()"
    )


def drawn(page):
    return page.run("[...document.querySelectorAll('#pool-play .owner')].map((each) => each.textContent)")


def test_texts_share_blocks_and_freed_ones_are_found_again(page):
    """Two texts share a block, a fork copies one, and what is freed can still be found."""
    click(page, "Start again")
    assert news(page) == ["An empty pool", "8 blocks of 4 slots are free. 8 of 8 blocks are free or cached."]
    click(page, "Add")
    choose(page, "pool-play-text", "the cat sat on the warm stone wall")
    click(page, "Add")
    assert drawn(page)[:4] == ["A and B, shared", "A", "B", "free"]
    assert news(page)[1].startswith("6 of its 8 words are found. It shares block 0. Block 1 is copied to block 2")
    click(page, "Fork")
    assert drawn(page)[:3] == ["A and B and C, shared", "A", "B and C, shared"]
    click(page, "Append")
    assert news(page)[0] == "C goes on with \N{LEFT DOUBLE QUOTATION MARK}and\N{RIGHT DOUBLE QUOTATION MARK}"
    for _ in "ABC":
        click(page, "Free")
    assert set(drawn(page)) == {"cached", "free"}
    click(page, "Forget what is cached")
    assert drawn(page) == ["free"] * 8
    click(page, "Free")
    assert news(page)[0] == "The cache is forgotten", "there is nothing to free"


def test_a_pool_that_is_full_says_so(page):
    click(page, "Start again")
    choose(page, "pool-play-text", "a dog ran after the red ball and the cat")
    for _ in range(12):
        click(page, "Add")
    assert news(page)[0] == "Refused"
    assert news(page)[1].startswith("Out of blocks: ")
    before = drawn(page)
    click(page, "Add")
    assert drawn(page) == before
