"use strict";

const PLAY_TEXTS = [
  "the cat sat on the warm mat today",
  "the cat sat on the warm stone wall",
  "a dog ran after the red ball and the cat",
  "the cat sat on the",
];
const PLAY_WORDS = ["and", "slept", "while it was raining"];
const PLAY_NAMES = [..."ABCDEFGHIJ"];

// A pool to try things on: add, append, fork and free sequences, and forget what is cached.
class FreePlay {
  constructor(place) {
    this.place = place;
    this.text = this.list("text", PLAY_TEXTS.map((text) => [text, text]));
    this.words = this.list("words", PLAY_WORDS.map((words) => [words, words]));
    this.name = this.list("sequence", []);
    this.view = new PoolView({ block_size: 4 });
    this.telling = liveRegion(place);
    const row = (...children) => element("div", { class: "controls" }, ...children);
    place.replaceChildren(
      row(field("Text", this.text), this.button("Add", () => this.add())),
      row(
        field("Sequence", this.name), this.button("Fork", () => this.fork(), true),
        this.button("Free", () => this.free(), true),
      ),
      row(field("Words", this.words), this.button("Append", () => this.append(), true)),
      row(this.button("Forget what is cached", () => this.forget()), this.button("Start again", () => this.start())),
      this.telling,
      this.view.root,
    );
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", "A pool of blocks, to play with");
    place.classList.add("playing");
    this.start();
  }

  list(name, choices) {
    const made = element("select", { id: `${this.place.id}-${name}` });
    made.append(...choices.map(([value, words]) => element("option", { value }, words)));
    return made;
  }

  // `needsSequence`: does nothing while there is none, and keeps the focus.
  button(words, act, needsSequence = false) {
    const made = element("button", { type: "button", "data-needs-sequence": needsSequence }, words);
    made.addEventListener("click", () => made.getAttribute("aria-disabled") !== "true" && act());
    return made;
  }

  start() {
    this.pool = new PoolModel(8, 4);
    this.shown = null;
    this.show("An empty pool", ["8 blocks of 4 slots are free."]);
  }

  nextName() {
    return PLAY_NAMES.find((name) => !this.pool.sequences.has(name)) ?? null;
  }

  add() {
    const name = this.nextName();
    if (name === null) return this.show("Not added", ["There are as many sequences as letters here: free one."]);
    const done = this.pool.add(name, this.text.value.split(" ")) !== null;
    return this.show(done ? `${name} is added` : "Refused", this.pool.news, done ? name : null);
  }

  append() {
    const name = this.name.value, done = this.pool.append(name, this.words.value.split(" "));
    this.show(done ? `${name} goes on with “${this.words.value}”` : "Refused", this.pool.news);
  }

  fork() {
    const fork = this.nextName();
    if (fork === null) return this.show("Not forked", ["There are as many sequences as letters here: free one."]);
    this.pool.fork(this.name.value, fork);
    return this.show(`${fork} is a fork of ${this.name.value}`, this.pool.news, fork);
  }

  free() {
    const name = this.name.value;
    this.pool.release(name);
    this.show(`${name} is freed`, this.pool.news);
  }

  forget() {
    this.pool.reset();
    this.show("The cache is forgotten", this.pool.news);
  }

  // What is in each block, and what each sequence has.
  state() {
    const sequences = [...this.pool.sequences], size = this.pool.blockSize;
    const blocks = this.pool.blocks.map(({ words }, block) => {
      const having = sequences.filter(([, each]) => each.blocks.includes(block));
      const texts = having.map(([, each]) => each.words.slice(each.blocks.indexOf(block) * size).slice(0, size));
      const longest = texts.reduce((one, other) => (other.length > one.length ? other : one), []);
      const kind = this.pool.kind(block);
      return { kind, owners: having.map(([name]) => name), words: kind === "used" ? longest : words };
    });
    const tables = sequences.map(([name, each]) => ({ name, length: each.words.length, blocks: each.blocks }));
    return { blocks, tables, requests: [] };
  }

  show(title, news, chosen = null) {
    const state = this.state(), names = [...this.pool.sequences.keys()];
    const before = chosen ?? this.name.value;
    this.name.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    this.name.value = names.includes(before) ? before : (names[0] ?? "");
    for (const button of this.place.querySelectorAll("[data-needs-sequence]")) {
      button.setAttribute("aria-disabled", String(!names.length));
    }
    const count = `${this.pool.numFree} of ${this.pool.blocks.length} blocks are free or cached.`;
    tell(this.telling, title, [...news, count].join(" "));
    this.view.show(state, this.shown);
    this.shown = state;
  }
}
