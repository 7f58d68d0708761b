"use strict";

// The pool and the prefix cache of pagedkv.memory in plain JavaScript, for words in place of token ids: the same blocks for
// the same calls, which tests/docs/test_free_play.py compares. Every sequence is committed as soon as it has words.
class PoolModel {
  constructor(numBlocks, blockSize) {
    this.blockSize = blockSize;
    // A block that can be found has a key, all words up to its end; serials tell contents apart, 0 is before the first.
    this.blocks = Array.from({ length: numBlocks }, () => ({
      refs: 0, key: null, words: [], serial: 0, parent: 0, behind: null,
    }));
    this.free = [...this.blocks.keys()].reverse(); // a stack
    this.waiting = []; // cached blocks, the first to be evicted first
    this.index = new Map();
    this.sequences = new Map();
    this.lastSerial = 0;
    this.news = []; // sentences about the last call
  }

  get numFree() {
    return this.free.length + this.waiting.length;
  }

  numBlocksOf(numWords) {
    return Math.ceil(numWords / this.blockSize);
  }

  // Start a sequence; what its first words have in the cache is shared, the beginning of one more block is copied.
  // How many words were found, or null if there is no room.
  add(name, words) {
    this.news = [];
    const size = this.blockSize;
    const shared = this.find(words);
    let copied = null, numFound = shared.length * size;
    if (shared.length) {
      let part;
      if (numFound === words.length) {
        // The last word is computed again, and others may find its block meanwhile, so it goes into a copy.
        part = [shared.pop(), size - 1];
        numFound -= size;
      } else part = this.findPart(shared.at(-1), words.slice(numFound, -1));
      const [block, more] = part, numNew = this.numBlocksOf(words.length) - shared.length;
      if (2 * more >= size && (numNew <= this.free.length || this.blocks[block].refs)) {
        copied = block;
        numFound += more;
      }
    }
    const fresh = this.change(this.numBlocksOf(words.length) - shared.length, { gained: shared });
    if (fresh === null) return null;
    if (numFound) this.news.push(`${numFound} of its ${words.length} words are found.`);
    if (shared.length) this.news.push(`It shares ${named(shared)}.`);
    if (copied !== null) this.news.push(`Block ${copied} is copied to block ${fresh[0]}, which it goes on writing.`);
    if (fresh.length) this.news.push(`It gets ${named(fresh)}.`);
    this.sequences.set(name, {
      words: [...words], blocks: [...shared, ...fresh], known: words.length, found: shared.length,
    });
    this.commit(name);
    return numFound;
  }

  // Append words; a last block that is not full and that others have, too, is copied first.
  append(name, words) {
    this.news = [];
    const sequence = this.sequences.get(name), length = sequence.words.length, last = sequence.blocks.at(-1);
    const isCopied = length % this.blockSize > 0 && this.blocks[last].refs > 1;
    const numAdded = this.numBlocksOf(length + words.length) - sequence.blocks.length;
    const fresh = this.change(numAdded + Number(isCopied), { dropped: isCopied ? [last] : [] });
    if (fresh === null) return false;
    if (isCopied) {
      this.news.push(`Block ${last} is shared, so it is copied to block ${fresh[0]} before ${name} writes.`);
      sequence.blocks.splice(-1, 1, fresh.shift());
    }
    if (fresh.length) this.news.push(`${name} gets ${named(fresh)}.`);
    else if (!isCopied) this.news.push("The last block has room, so no other one is needed.");
    if (sequence.known === length) sequence.known += words.length;
    sequence.blocks.push(...fresh);
    sequence.words.push(...words);
    this.commit(name);
    return true;
  }

  // Start a sequence with all blocks of another one.
  fork(name, fork) {
    const { words, blocks, known, found } = this.sequences.get(name);
    for (const block of blocks) this.blocks[block].refs += 1;
    this.sequences.set(fork, { words: [...words], blocks: [...blocks], known, found });
    this.news = [`${fork} shares ${named(blocks)} with ${name}. Nothing is copied.`];
  }

  release(name) {
    this.news = [];
    const { blocks } = this.sequences.get(name);
    this.sequences.delete(name);
    this.change(0, { dropped: blocks });
    const words = { used: "stays with other sequences", cached: "is cached: its words can still be found", free: "is free" };
    for (const block of blocks) this.news.push(`Block ${block} ${words[this.kind(block)]}.`);
  }

  // Forget everything that can be found.
  reset() {
    const findable = [...this.blocks.keys()].filter((block) => this.blocks[block].key !== null);
    this.change(0, { forgotten: findable });
    for (const sequence of this.sequences.values()) sequence.known = sequence.found = 0;
    this.news = [findable.length ? `${named(findable)} can no longer be found.` : "Nothing was cached."];
  }

  kind(block) {
    return this.blocks[block].refs ? "used" : this.blocks[block].key === null ? "free" : "cached";
  }

  // The blocks that hold the first words, as far as they can be found.
  find(words) {
    const found = [];
    for (let end = this.blockSize; end <= words.length; end += this.blockSize) {
      const block = this.index.get(words.slice(0, end).join(" "));
      if (block === undefined || this.blocks[block].parent !== this.serialOf(found.at(-1))) break;
      found.push(block);
    }
    return found;
  }

  // The block that was stored last behind another one, and how many of its words are the same.
  findPart(above, words) {
    const block = this.blocks[above].behind, behind = this.blocks[block];
    if (block === null || behind.key === null || behind.parent !== this.blocks[above].serial) return [null, 0];
    const most = Math.min(words.length, this.blockSize - 1), other = behind.words.findIndex((word, i) => word !== words[i]);
    return [block, other < 0 ? most : Math.min(other, most)];
  }

  serialOf(block) {
    return block === undefined ? 0 : this.blocks[block].serial;
  }

  // Everything that one call does to the pool: the new blocks, or null if there are too few.
  change(numNew, { gained = [], dropped = [], forgotten = [] }) {
    const leaving = gained.filter((block) => !this.blocks[block].refs);
    if (numNew > this.numFree - leaving.length) {
      const count = this.numFree - leaving.length;
      this.news = [`Out of blocks: ${numNew} needed, ${count} free. Nothing has changed.`];
      return null;
    }
    forgotten = this.withAllBehind(forgotten);
    const blank = forgotten.filter((block) => !this.blocks[block].refs && !leaving.includes(block));
    for (const block of dropped) this.blocks[block].refs -= 1;
    for (const block of gained) this.blocks[block].refs += 1;
    const freed = dropped.filter((block) => !this.blocks[block].refs);
    this.waiting = this.waiting.filter((block) => !leaving.includes(block) && !blank.includes(block));
    const fresh = this.free.splice(Math.max(0, this.free.length - numNew)).reverse();
    const evicted = this.waiting.splice(0, numNew - fresh.length);
    if (evicted.length) this.news.push(`No block is free, so ${named(evicted)}, unused for longest, is evicted.`);
    for (const block of [...forgotten, ...evicted]) this.forget(block);
    const kept = freed.filter((block) => this.blocks[block].key !== null);
    this.waiting.push(...kept.sort((a, b) => this.blocks[b].serial - this.blocks[a].serial)); // last blocks first
    this.free.push(...[...freed.filter((block) => !kept.includes(block)), ...blank].reverse());
    for (const block of [...fresh, ...evicted]) this.blocks[block].refs = 1;
    return [...fresh, ...evicted];
  }

  // These blocks and all that are found only behind them.
  withAllBehind(blocks) {
    const lost = new Set(blocks);
    for (const parent of lost)
      this.blocks.forEach(({ key, parent: above }, block) => {
        if (key !== null && above && above === this.blocks[parent].serial) lost.add(block);
      });
    return [...lost];
  }

  forget(block) {
    const { key } = this.blocks[block];
    if (this.index.get(key) === block) this.index.delete(key);
    Object.assign(this.blocks[block], { key: null, words: [], serial: 0 });
  }

  // Let the full blocks of a sequence be found; one whose words are there already gives way to the block that has them.
  commit(name) {
    const sequence = this.sequences.get(name), size = this.blockSize, gained = [], dropped = [], forgotten = [];
    for (; sequence.found < Math.floor(sequence.known / size); sequence.found += 1) {
      const i = sequence.found, end = (i + 1) * size, key = sequence.words.slice(0, end).join(" ");
      const own = sequence.blocks[i], above = sequence.blocks[i - 1], parent = this.serialOf(above);
      const other = this.index.get(key);
      if (other !== undefined && this.blocks[other].parent === parent) {
        gained.push(other);
        dropped.push(own);
        sequence.blocks[i] = other;
        this.news.push(`Block ${own} has the words of block ${other}, so ${name} goes on with block ${other}.`);
        continue;
      }
      if (other !== undefined) forgotten.push(other);
      this.lastSerial += 1;
      const words = sequence.words.slice(i * size, end);
      Object.assign(this.blocks[own], { key, words, parent, serial: this.lastSerial });
      this.index.set(key, own);
      if (above !== undefined) this.blocks[above].behind = own;
    }
    this.change(0, { gained, dropped, forgotten });
  }
}

// Numbers of blocks in words.
function named(blocks) {
  const words = blocks.length > 1 ? `${blocks.slice(0, -1).join(", ")} and ${blocks.at(-1)}` : blocks.join("");
  return `block${blocks.length > 1 ? "s" : ""} ${words}`;
}
