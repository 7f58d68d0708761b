"use strict";

// What a thread block of v1 has at a step; the reader chooses a chunk of tokens and a lane of the warp that takes it.
class ThreadBlockView {
  constructor(run, id) {
    this.run = run;
    this.numChunks = run.block_table.length;
    this.chunk = this.choice(`${id}-chunk`, this.numChunks, (i) => `${i} (warp ${i % run.num_warps})`, 1);
    this.lane = this.choice(`${id}-lane`, run.partials[0].length, String, 0);
    this.choices = element(
      "div",
      { class: "controls" },
      element("label", { for: this.chunk.id }, "Chunk"),
      this.chunk,
      element("label", { for: this.lane.id }, "Lane"),
      this.lane,
    );
    this.panel = element("div", { class: "panel", "aria-live": "off" });
    this.root = element("div", { class: "state" }, this.choices, this.panel);
  }

  choice(id, count, name, first) {
    const options = Array.from({ length: count }, (_, i) => element("option", { value: i }, name(i)));
    const made = element("select", { id }, options);
    made.value = String(first);
    made.addEventListener("change", () => this.show(this.step));
    return made;
  }

  show(step) {
    this.step = step;
    const [chunk, lane] = [Number(this.chunk.value), Number(this.lane.value)];
    const drawn = this[step.show](chunk, lane);
    this.choices.hidden = !step.chooses;
    this.panel.replaceChildren(...drawn);
  }

  // -- numbers and names
  first(chunk) {
    return chunk * this.run.chunk_size;
  }

  warp(chunk) {
    return chunk % this.run.num_warps;
  }

  token(chunk, lane) {
    return this.first(chunk) + Math.floor(lane / this.run.group_size);
  }

  // The rows of V, elements of head_dim, that a lane sums.
  rows(lane) {
    const first = Math.floor(lane / this.run.v_vecs);
    return this.run.accs[0].map((_, i) => first + i * this.run.rows_per_iter);
  }

  firstOfVector(chunk, lane) {
    return this.first(chunk) + (lane % this.run.v_vecs) * this.run.vec_size;
  }

  quarters(numbers) {
    return numbers.map((number) => shown(number / 4)).join(", ");
  }

  cells(label, values, name, words, marked = -1) {
    const items = values.map((value, i) =>
      element(
        "li",
        { class: i === marked ? "cell chosen" : "cell", "aria-current": i === marked ? "true" : null },
        element("span", { class: "name" }, name(i)),
        element("span", {}, words(value, i)),
      ),
    );
    return element("ul", { class: "cells", "aria-label": label }, items);
  }

  ofLanes(chunk, lane, values, words) {
    const label = `Lanes of warp ${this.warp(chunk)} at chunk ${chunk}`;
    return [element("p", { class: "label" }, label), this.cells(label, values, (i) => `lane ${i}`, words, lane)];
  }

  ofTokens(chunk, values, label) {
    const first = this.first(chunk);
    const own = values.slice(first, first + this.run.chunk_size);
    const name = (i) => (first + i < this.run.seq_len ? `token ${first + i}` : `slot ${first + i}, unused`);
    return [element("p", { class: "label" }, `${label} of chunk ${chunk}`), this.cells(label, own, name, shown)];
  }

  inVectors(numbers, words) {
    const size = this.run.vec_size;
    return Array.from({ length: numbers.length / size }, (_, i) => [
      `${i * size} to ${(i + 1) * size - 1}`,
      words(numbers.slice(i * size, (i + 1) * size)),
    ]);
  }

  ofWarps(caption, heading, values) {
    return tableOf(caption, ["Warp", heading], values.map((value, i) => [`warp ${i}`, shown(value)]));
  }

  // -- what is shown at a step
  grid() {
    const { run } = this;
    const rows = [
      ["Thread block", `${run.thread_block} of 0 to ${run.num_thread_blocks - 1}`],
      ["Sequence", `${run.seq_idx}, of ${run.seq_len} tokens`],
      ["Query head", run.head_idx],
      ["KV head", run.kv_head_idx],
      ["Threads", `${run.num_warps} warps of ${run.partials[0].length} lanes`],
    ];
    return [tableOf("What it works on", ["Of the launch", "Here"], rows)];
  }

  query() {
    const rows = this.inVectors(this.run.q, (numbers) => this.quarters(numbers));
    return [tableOf("q_vecs in shared memory", ["Elements", "Values"], rows)];
  }

  blocks() {
    const rows = this.run.block_table.map((block, i) => [i, this.tokens(i), block]);
    return [tableOf("The sequence's row of block_tables", ["Column", "Tokens", "Block"], rows)];
  }

  tokens(chunk) {
    const first = this.first(chunk);
    return `${first} to ${Math.min(first + this.run.chunk_size, this.run.seq_len) - 1}`;
  }

  chunks() {
    const { num_warps: warps, block_table: table } = this.run;
    const rows = table.map((block, i) => [i, this.tokens(i), block, this.warp(i), Math.floor(i / warps) + 1]);
    return [tableOf("Who takes which chunk", ["Chunk", "Tokens", "Block", "Warp", "In turn"], rows)];
  }

  keyLoads(chunk, lane) {
    const loads = this.run.k_bytes[chunk];
    const words = (own, i) => (own.length ? `token ${this.token(chunk, i)}` : "no token");
    const rows = loads[lane].map((byte, j) => [this.keyVector(lane, j), `${byte} to ${byte + 15}`]);
    const table = tableOf(`Loads of lane ${lane}, 16 bytes each`, ["Vector", "Bytes of k_cache"], rows);
    return [table, ...this.ofLanes(chunk, lane, loads, words)];
  }

  keyVector(lane, j) {
    return (lane % this.run.group_size) + j * this.run.group_size;
  }

  shares(chunk, lane) {
    const { k, q, k_bytes: loads, partials, vec_size: size } = this.run;
    const token = this.token(chunk, lane);
    const rows = loads[chunk][lane].map((_, j) => {
      const from = this.keyVector(lane, j) * size;
      return [
        this.keyVector(lane, j),
        this.quarters(k[token].slice(from, from + size)),
        this.quarters(q.slice(from, from + size)),
      ];
    });
    const caption = `Lane ${lane}, ${rows.length ? `token ${token}` : "no token"}: all products add up to ` +
      shown(partials[chunk][lane]);
    return [tableOf(caption, ["Vector", "Of the key", "Of q"], rows), ...this.ofLanes(chunk, lane, partials[chunk], shown)];
  }

  products(chunk, lane) {
    const { partials, group_size: size } = this.run;
    const first = lane - (lane % size);
    const rows = Array.from({ length: size }, (_, i) => [`lane ${first + i}`, shown(partials[chunk][first + i])]);
    rows.push(["both have", shown(this.run.products[this.token(chunk, lane)])]);
    const both = partials[chunk].map((_, i) => this.run.products[this.token(chunk, i)]);
    const table = tableOf(`q . k of ${rows.length ? `slot ${this.token(chunk, lane)}` : ""}`, ["", "Sum"], rows);
    return [table, ...this.ofLanes(chunk, lane, both, shown)];
  }

  logits(chunk) {
    return this.ofTokens(chunk, this.run.logits, "Logits");
  }

  maxima() {
    return [this.ofWarps("red_smem: the largest logit of each warp", "Largest logit", this.run.warp_maxima)];
  }

  exps(chunk) {
    const table = this.ofWarps("red_smem: the sum of each warp's threads", "Sum", this.run.warp_sums);
    return [table, ...this.ofTokens(chunk, this.run.exps, "Exponentials")];
  }

  weights(chunk) {
    return this.ofTokens(chunk, this.run.weights, "Weights");
  }

  valueLoads(chunk, lane) {
    const loads = this.run.v_bytes[chunk];
    const first = (i) => this.firstOfVector(chunk, i);
    const words = (own, i) =>
      own.length ? `slots ${first(i)} to ${first(i) + this.run.vec_size - 1}` : "reads nothing";
    const rows = loads[lane].map((byte, i) => [`element ${this.rows(lane)[i]}`, `${byte} to ${byte + 15}`]);
    const table = tableOf(`Loads of lane ${lane}, 8 tokens each`, ["Row", "Bytes of v_cache"], rows);
    return [table, ...this.ofLanes(chunk, lane, loads, words)];
  }

  sums(chunk, lane) {
    const { v, weights, accs, v_bytes: loads, seq_len: length, vec_size: size, num_warps: warps } = this.run;
    const first = this.firstOfVector(chunk, lane);
    const tokens = Array.from({ length: size }, (_, i) => first + i).filter((token) => token < length);
    const own = accs[this.warp(chunk) * loads[chunk].length + lane];
    const isRead = loads[chunk][lane].length > 0;
    const rows = this.rows(lane).map((row, i) => [
      `element ${row}`,
      isRead ? tokens.map((token) => shown(v[token][row] / 4)).join(", ") : "not read",
      shown(own[i]),
    ]);
    const weighed = isRead
      ? `Weights of tokens ${tokens[0]} to ${tokens.at(-1)}: ${tokens.map((token) => shown(weights[token])).join(", ")}.`
      : "This vector has no used token.";
    const all = this.run.block_table.map((_, i) => i).filter((i) => i % warps === this.warp(chunk));
    const caption = `accs of lane ${lane}, after chunk${all.length > 1 ? "s" : ""} ${all.join(" and ")}`;
    return [element("p", {}, weighed), tableOf(caption, ["Row", "Values in this chunk", "Sum"], rows)];
  }

  rowSums(chunk, lane) {
    const { accs, in_warps: sums, v_vecs: size } = this.run;
    const warp = this.warp(chunk);
    const first = lane - (lane % size);
    const names = Array.from({ length: size }, (_, i) => `Lane ${first + i}`);
    const lanes = this.run.partials[0].length;
    const rows = this.rows(lane).map((row, i) => [
      `element ${row}`,
      ...names.map((_, j) => shown(accs[warp * lanes + first + j][i])),
      shown(sums[warp][row]),
    ]);
    return [tableOf(`Rows of warp ${warp}`, ["Row", ...names, "Both"], rows)];
  }

  warpSums(chunk, lane) {
    const { in_warps: sums, halves, out } = this.run;
    const rows = this.rows(lane).map((row) => [
      `element ${row}`,
      ...sums.map((own) => shown(own[row])),
      ...halves.map((own) => shown(own[row])),
      shown(out[row]),
    ]);
    const headings = ["Row", ...sums.map((_, i) => `Warp ${i}`), "0 + 2", "1 + 3", "All"];
    return [tableOf("Sums of the warps", headings, rows)];
  }

  output() {
    const rows = this.inVectors(this.run.out, (numbers) => numbers.map(shown).join(", "));
    return [tableOf("out of this sequence and head", ["Elements", "Values"], rows)];
  }
}
