"""The run of a pool in explanation/step_by_step.md: ``python docs/scripts/record_pool.py`` writes it, and its picture.

Every step runs its line of code on a real cache, and a real scheduler later. What the page shows is read off the cache
after it. Which blocks were handed out, copied, found or evicted is told from the states before and after; only the
reasons are written here. The tests compare the files with what this records: a manager that changes changes its page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from draw_kernels import COLOURS, GREY, IMAGES, INK, LINE, SHADE, WHITE, box, drawing, text, title

from pagedkv import PagedKVCache, Scheduler

DATA = Path(__file__).parents[1] / "_static" / "step_by_step"
NUM_BLOCKS, BLOCK_SIZE = 8, 4
REQUESTS = {  # prompt, and what our model says
    "E": ("why do cats sleep all day long", "they hunt at dawn and at dusk mostly"),
    "F": ("name a good pet please now", "a cat or maybe two of them"),
    "G": ("what is a purr", "a sound that cats make when they are at ease"),
}


class Step(NamedTuple):
    """A line that is run, and why what happens then is done that way."""

    chapter: str
    title: str
    code: str
    why: str


STEPS = (
    Step(
        "Allocation",
        "An empty pool",
        f"cache = PagedKVCache(num_layers=1, num_blocks={NUM_BLOCKS}, block_size={BLOCK_SIZE}, num_kv_heads=1, "
        "head_dim=8)",
        "Memory is cut into blocks of one size before anything runs, so any free block fits any sequence and no gap is "
        "ever too small to use.",
    ),
    Step(
        "Allocation",
        "Sequence A starts",
        'a, num_cached = cache.add(ids("the cat sat on the warm"))',
        "A gets the blocks that its 6 tokens need now, not room for the longest text it might become, so at most the "
        "end of its last block is unused.",
    ),
    Step(
        "Allocation",
        "A grows by a token",
        'cache.append([a], tokens=ids("mat"))',
        "A's last block still has an empty slot, so a new token costs no new block.",
    ),
    Step(
        "Sharing",
        "B forks from A",
        "[b] = cache.fork(a)",
        "Both texts have had the same words so far, so B's row of the table names A's blocks, no key or value is "
        "copied, and each block counts who refers to it so that it outlives the first to leave.",
    ),
    Step(
        "Copy-on-write",
        "A and B write different words",
        'cache.append([a, b], tokens=ids("and today"))',
        "Both need the same slot for different words, and what another sequence reads is never overwritten, so one of "
        "them writes to a copy of that block; the last owner keeps the old one and saves a copy.",
    ),
    Step(
        "Copy-on-write",
        "They grow apart",
        'cache.append([a, b], tokens=ids("purred dear"))',
        "Their last blocks are full, so each gets a block of its own; the first block stays shared, because nobody "
        "writes to a full block again.",
    ),
    Step(
        "Freeing and finding",
        "Keys and values are written",
        "cache.commit([a, b])",
        "A block may be found by its words only when its keys and values are there in every layer, and commit is how "
        "the caller says so.",
    ),
    Step(
        "Freeing and finding",
        "A ends",
        "cache.free([a])",
        "What only A had goes back: the full block is kept as cached, since someone may begin with the same words, and "
        "the partial one is simply free.",
    ),
    Step(
        "Freeing and finding",
        "B ends",
        "cache.free([b])",
        "Cached blocks count as free: keeping them costs nothing, because they are given away as soon as nothing else "
        "is left.",
    ),
    Step(
        "Freeing and finding",
        "C begins like B",
        'c, num_cached = cache.add(ids("the cat sat on the warm mat today I think"))',
        "Looking up 8 words is far cheaper than computing their keys and values again, so C takes B's cached blocks "
        "and only its last 2 tokens are left to compute.",
    ),
    Step(
        "Eviction",
        "D needs every block",
        'd, num_cached = cache.add(ids("once upon a time a small grey cat lived in a big old house by the sea"))',
        "Blocks that hold nothing are used up first, and only then is a cached one evicted, the one used least "
        "recently, because it is the least likely to be asked for again.",
    ),
    Step(
        "Eviction",
        "A clean pool",
        "cache.free([c, d]); cache.reset()",
        "Keys and values belong to one set of weights, so when the weights change a server forgets all that could be "
        "found; here it clears the pool for the next part.",
    ),
    Step(
        "Preemption",
        "Three requests wait",
        "scheduler = Scheduler(cache); [add(name) for name in requests]",
        "A request that waits has no block yet: the scheduler decides at each step what the pool has room for.",
    ),
    Step(
        "Preemption",
        "All three start",
        "run(1)",
        "Each has room for its whole prompt, and the prompts go into one step, because a step that computes more "
        "tokens makes better use of the same weights.",
    ),
    Step(
        "Preemption",
        "They generate",
        "run(2)",
        "Nobody knows how long a text will be, so blocks are handed out one by one as the texts grow.",
    ),
    Step(
        "Preemption",
        "G gives its blocks back",
        "while scheduler.num_preempted == 0: run(1)",
        "The next tokens need more blocks than are free, so the request that came last waits again; the first one "
        "never has to, so some request always gets on, and G's full blocks stay cached until they are needed.",
    ),
    Step(
        "Preemption",
        "The others use the room",
        "run(1)",
        "Those that came first go on at full speed, and take a cached block of G's only because no other is free: the "
        "last one, since the first ones are what a text that begins alike would look for.",
    ),
    Step(
        "Preemption",
        "G comes back",
        "run(1)",
        "There is room again, so G starts with all the tokens that it has so far: what is still cached is found, only "
        "the rest is computed again, and its text goes on as if nothing had happened.",
    ),
    Step(
        "Preemption",
        "Everything has ended",
        "while scheduler.num_running: run(1)",
        "Every request got its whole text from a pool that could not hold all three at once, which is the point of "
        "giving blocks back.",
    ),
)


class Vocabulary:
    """Words as token ids, and back."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def ids(self, sentence: str) -> list[int]:
        """The ids of words."""
        new = [word for word in dict.fromkeys(sentence.split()) if word not in self.words]
        self.words += new
        return [self.words.index(word) for word in sentence.split()]


class Run:
    """What the lines of the steps name: a cache, a scheduler, and the loop of a server around it."""

    def __init__(self) -> None:
        self.vocabulary, self.requests, self.ended = Vocabulary(), dict[int, str](), set[int]()
        self.names: dict[str, Any] = {
            "PagedKVCache": PagedKVCache,
            "Scheduler": Scheduler,
            "ids": self.vocabulary.ids,
            "requests": REQUESTS,
            "add": self.add,
            "run": self.run,
        }

    @property
    def cache(self) -> PagedKVCache:
        return self.names["cache"]  # type: ignore[no-any-return]

    @property
    def scheduler(self) -> Scheduler:
        return self.names["scheduler"]  # type: ignore[no-any-return]

    def add(self, name: str) -> None:
        """Let a request wait."""
        prompt, answer = (self.vocabulary.ids(words) for words in REQUESTS[name])
        self.requests[self.scheduler.add(prompt, max_tokens=len(answer))] = name

    def run(self, count: int) -> None:
        """So many steps of a server; the model says the next word of the answer."""
        for _ in range(count):
            step = self.scheduler.schedule()
            assert step is not None
            said = []
            for number in step.sampled.tolist():
                prompt, answer = (self.vocabulary.ids(words) for words in REQUESTS[self.requests[number]])
                said.append(answer[len(self.scheduler.tokens(number)) - len(prompt)])
            self.ended |= {done.request for done in self.scheduler.update(step, said)}

    def sequences(self) -> dict[str, int]:
        """The handles of the sequences that are alive, by their letters."""
        alive = {}
        for name in "abcd":
            if name in self.names:
                try:
                    self.cache.seq_lens(self.names[name])
                except KeyError:
                    continue
                alive[name.upper()] = int(self.names[name])
        if "scheduler" in self.names:
            running = self.scheduler._running
            lanes = running.lanes
            alive |= {
                self.requests[number]: seq
                for number, seq in zip(running.numbers[lanes].tolist(), running.seqs[lanes].tolist(), strict=True)
            }
        return alive

    def state(self) -> dict[str, Any]:
        """The pool, the tables and the requests as they are now."""
        cache = self.cache
        tables = {
            name: (int(cache.seq_lens(seq)[0]), cache.block_tables([seq])[0].tolist())
            for name, seq in self.sequences().items()
        }
        found = cache.pool._prefix_cache
        assert found is not None
        findable, fills = found.is_findable(np.arange(NUM_BLOCKS)), cache.block_fills()
        blocks = []
        for block, refs in enumerate(cache.pool.ref_counts.tolist()):
            kind = "used" if refs else "cached" if findable[block] else "free"
            filled = int(fills[block]) if refs else BLOCK_SIZE if findable[block] else 0
            tokens = found.tokens.reshape(NUM_BLOCKS, -1)[block, :filled].tolist()
            owners = [name for name, (_, row) in tables.items() if block in row]
            assert len(owners) == refs
            blocks.append(
                {
                    "kind": kind,
                    "owners": owners,
                    "words": [self.vocabulary.words[token] for token in tokens],
                    "findable": bool(findable[block]),
                }
            )
        return {
            "blocks": blocks,
            "tables": [{"name": name, "length": length, "blocks": row} for name, (length, row) in tables.items()],
            "requests": self.request_states(),
        }

    def request_states(self) -> list[dict[str, Any]]:
        """Where each request is: waits, runs or has ended, with what it has computed."""
        rows = []
        for number, name in self.requests.items():
            if number in self.ended:
                prompt, answer = REQUESTS[name]
                rows.append({"name": name, "state": "ended", "tokens": len(prompt.split()) + len(answer.split())})
                continue
            found = self.scheduler._requests[number]
            state = "waits" if number in self.scheduler._waiting else "runs"
            rows.append({"name": name, "state": state, "tokens": len(self.scheduler.tokens(number))})
            if state == "runs":
                rows[-1]["computed"] = int(self.scheduler._running.num_computed[found.lane])
        return rows


def listed(items: list[Any]) -> str:
    """A, B and C."""
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def named(blocks: list[int]) -> str:
    """Block 1, or blocks 1 and 2."""
    return f"block{'s' if len(blocks) > 1 else ''} {listed(blocks)}"


def what_happened(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Sentences on what differs between two states."""
    old, new = ({row["name"]: row["blocks"] for row in state["tables"]} for state in (before, after))
    kinds_before, kinds = ([block["kind"] for block in state["blocks"]] for state in (before, after))
    for name, row in new.items():
        had = old.get(name, [])
        copied = [(a, b) for a, b in zip(had, row, strict=False) if a != b]
        for source, block in copied:
            yield f"Block {source} is copied to block {block} for {name}."
        fresh = row[len(had) :]
        shared = [block for block in fresh if any(block in other for other in old.values())]
        found = [
            block
            for block in fresh
            if block not in shared
            and kinds_before[block] == "cached"
            and before["blocks"][block]["words"] == after["blocks"][block]["words"]
        ]
        handed = [block for block in fresh if block not in shared and block not in found]
        if shared:
            yield f"{name} shares {named(shared)}."
        if found:
            yield f"{name} finds {named(found)}."
        if handed:
            yield f"{name} gets {named(handed)}."
    taken = [
        i
        for i, kind in enumerate(kinds)
        if kinds_before[i] == "cached"
        and kind == "used"
        and before["blocks"][i]["words"] != after["blocks"][i]["words"]
    ]
    if taken:
        yield f"What was cached in {named(taken)} is evicted."
    gone = [name for name in old if name not in new]
    if gone:
        yield f"{listed(gone)} {'has' if len(gone) == 1 else 'have'} no blocks any more."
    for kind in ("cached", "free"):
        blocks = [i for i, now in enumerate(kinds) if now == kind != kinds_before[i]]
        if blocks:
            yield f"{named(blocks).capitalize()} {'is' if len(blocks) == 1 else 'are'} {kind} now."
    found_now = [
        i
        for i, block in enumerate(after["blocks"])
        if block["kind"] == "used" and block["findable"] and not before["blocks"][i]["findable"]
    ]
    if found_now:
        yield f"{named(found_now).capitalize()} can be found by {'its' if len(found_now) == 1 else 'their'} words now."


def record() -> dict[str, Any]:
    """All steps, with the state after each."""
    run, steps, before = Run(), [], None
    for step in STEPS:
        exec(step.code, run.names)
        run.cache.check()
        state = run.state()
        what = (
            " ".join(what_happened(before, state)) if before else f"{NUM_BLOCKS} blocks of {BLOCK_SIZE} slots are free."
        )
        steps.append({**step._asdict(), "what": what or "No block changes hands.", **state})
        before = state
    return {"block_size": BLOCK_SIZE, "steps": steps}


def script(name: str, data: dict[str, Any]) -> str:
    """Data as a script, which browsers load from the file system too, where they fetch no JSON."""
    lines = ",\n".join(
        f'"{key}": {json.dumps(value, ensure_ascii=False, separators=(",", ":"))}'
        for key, value in data.items()
        if key != "steps"
    )
    steps = ",\n".join(json.dumps(step, ensure_ascii=False, separators=(",", ":")) for step in data["steps"])
    head = "// Written by docs/scripts/record_*.py from a run of the package."
    return f'{head}\nconst {name} = {{{lines},\n"steps": [\n{steps}\n]}};\n'


def pool_run() -> str:
    """All steps under each other: who has which block."""
    data, left, wide, high = record(), 330, 51, 24
    parts, top, chapter = [title(20, 30, "A pool of 8 blocks, step by step: who has which block")], 62, ""
    parts += [text(left + wide * (i + 0.5), 54, f"block {i}", 10, "middle", GREY) for i in range(NUM_BLOCKS)]
    for step in data["steps"]:
        if step["chapter"] != chapter:
            chapter = step["chapter"]
            parts.append(text(20, top + 15, chapter, 11, fill=GREY))
        parts.append(text(left - 12, top + 15, step["title"], 12, "end"))
        for i, block in enumerate(step["blocks"]):
            words = {"used": " ".join(block["owners"]), "cached": "cached", "free": ""}[block["kind"]]
            fill = {"used": COLOURS[0 if len(block["owners"]) < 2 else 2], "cached": SHADE, "free": WHITE}[
                block["kind"]
            ]
            parts.append(
                box(left + wide * i, top, wide - 3, high - 4, fill, LINE if block["kind"] == "free" else INK, words)
            )
        top += high
    parts.append(
        text(
            20,
            top + 16,
            "A letter is a sequence that has the block; a block with two letters is shared; an empty one is free.",
            11,
            fill=GREY,
        )
    )
    return drawing(top + 32, parts)


DRAWINGS: dict[str, Callable[[], str]] = {"memory/pool-run.svg": pool_run}
SCRIPTS: dict[str, Callable[[], str]] = {"pool_run.js": lambda: script("POOL_RUN", record())}

if __name__ == "__main__":
    for file, draw in DRAWINGS.items():
        (IMAGES / file).write_text(draw(), encoding="utf-8")
    for file, write in SCRIPTS.items():
        (DATA / file).write_text(write(), encoding="utf-8")
