"""A twin of Scheduler in plain Python, one request at a time, over a cache in which nothing is found."""

from dataclasses import dataclass
from itertools import count


@dataclass(eq=False)
class Text:
    number: int
    key: int
    tokens: list
    max_len: int
    priority: int
    computed: int = 0
    copied: int = 0

    @property
    def place(self):
        return self.key, self.number

    @property
    def uncomputed(self):
        return len(self.tokens) - self.computed


class Twin:
    def __init__(
        self, num_blocks, block_size, budget, max_num_seqs, watermark, aging, windows=(None,), keep=0, swaps=False
    ):
        self.num_blocks, self.block_size, self.budget = num_blocks, block_size, budget
        self.max_num_seqs, self.watermark, self.aging = max_num_seqs, watermark, aging
        self.waiting, self.running, self.idle = [], [], []
        # How many tokens a query sees before its own, in each group of layers, and `keep` more.
        seen = [float("inf") if window is None else window - 1 for window in windows]
        leader = seen.index(max(seen))
        seen[leader] = max(seen[leader], block_size)  # the next block is stored behind the last full one
        self.behind = [before + keep for before in seen]
        self.swaps = swaps
        self.numbers, self.steps, self.preempted, self.taken = count(), 0, 0, 0

    def add(self, tokens, max_tokens, priority):
        number = next(self.numbers)
        key = self.steps + priority * self.aging
        self.waiting.append(Text(number, key, list(tokens), len(tokens) + max_tokens, priority))
        return number

    def extend(self, number, tokens, max_tokens):
        [text] = [text for text in self.idle if text.number == number]
        self.idle.remove(text)
        text.tokens += tokens
        text.max_len, text.key = len(text.tokens) + max_tokens, self.steps + text.priority * self.aging
        self.waiting.append(text)

    def abort(self, number):
        for texts in (self.waiting, self.running, self.idle):
            texts[:] = [text for text in texts if text.number != number]

    def blocks(self, num_tokens):
        return -(-num_tokens // self.block_size)

    def held(self, num_tokens):
        """The blocks of each group that a text has when so many tokens are computed."""
        start = num_tokens - num_tokens % self.block_size
        return [self.blocks(num_tokens) - max(0, start - behind) // self.block_size for behind in self.behind]

    def peaks(self, num_tokens, chunk):
        """The most blocks of each group that a text has."""
        size = self.block_size
        bounds = [self.blocks(chunk + size - 1) + -(-behind // size) for behind in self.behind]
        return [min(self.blocks(num_tokens), bound) for bound in bounds]

    @property
    def num_free(self):
        return self.num_blocks - self.taken - sum(sum(self.held(text.computed)) for text in self.running)

    def counts(self):
        """How many tokens of each text: one of each first, what is left to the first that need it."""
        left = self.budget - len(self.running)
        counts = []
        for text in self.running:
            more = min(text.uncomputed - 1, left)
            left -= more
            counts.append(1 + more)
        return counts

    def needed(self, counts):
        """Blocks for so many more tokens of each text."""
        return len(self.behind) * sum(
            self.blocks(text.computed + n) - self.blocks(text.computed)
            for text, n in zip(self.running, counts, strict=True)
        )

    def still_needed(self, text):
        """Blocks that a text needs besides those that it has, for its tokens so far."""
        peaks = self.peaks(len(text.tokens), min(self.budget, text.uncomputed))
        return sum(peaks) - sum(self.held(text.computed))

    def schedule(self):
        """The number and the count of each text in the step; OutOfBlocksError is a str."""
        preempted = False
        while self.needed(self.counts()) > self.num_free:
            text = self.running.pop()
            text.computed, text.copied = 0, text.computed if self.swaps else 0
            self.waiting.append(text)
            self.preempted, preempted = self.preempted + 1, True
        self.waiting.sort(key=lambda text: text.place)
        while not (preempted and self.running) and self.waiting and len(self.running) < self.max_num_seqs:
            if sum(text.uncomputed for text in self.running) >= self.budget:
                break
            text = self.waiting[0]
            reserve = sum(map(self.still_needed, self.running)) + (self.watermark if self.running else 0)
            if sum(self.peaks(len(text.tokens), self.budget)) + reserve > self.num_free:
                if not self.running:
                    return "out of blocks"
                break
            self.running.append(self.waiting.pop(0))
            text.computed, text.copied = text.copied, 0
            self.running.sort(key=lambda text: text.place)
        if not self.running:
            return None
        self.steps += 1
        return [(text.number, n) for text, n in zip(self.running, self.counts(), strict=True)]

    def update(self, plan, tokens, eos):
        """Texts that leave, and why; a text of the plan that was aborted has a token, too, which nobody gets."""
        tokens, finished, texts = iter(tokens), [], {text.number: text for text in self.running}
        for number, n, is_sampled in plan:
            token = next(tokens) if is_sampled else None
            if number in texts:
                text = texts[number]
                text.computed += n
                if is_sampled:
                    text.tokens.append(token)
                    if token == eos or len(text.tokens) == text.max_len:
                        text.computed = 0
                        self.running.remove(text)
                        self.idle.append(text)
                        finished.append((number, "stop" if token == eos else "length"))
        return finished
