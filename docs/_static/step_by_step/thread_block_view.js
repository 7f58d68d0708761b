"use strict";

// A sum of products of multiples of 1/4.
const exact = (number) => shown(number, 9);

// What a thread block of v1 has at a step; the reader chooses a chunk of tokens and a lane of the warp that takes it.
class ThreadBlockView {
  constructor(run, id) {
    this.run = run;
    this.numChunks = run.block_table.length;
    this.chunk = this.choice(`${id}-chunk`, this.numChunks, (i) => `${i} (warp ${i % run.num_warps})`, 1);
    this.lane = this.choice(`${id}-lane`, run.partials[0].length, String, 0);
    this.fields = { chunk: field("Chunk", this.chunk), lane: field("Lane", this.lane) };
    this.choices = element("div", { class: "controls" }, this.fields.chunk, this.fields.lane);
    this.chosen = element("p", { "aria-live": "off" });
    this.panel = element("div");
    this.root = element("div", { class: "state" }, this.choices, this.chosen, this.panel);
  }

  choice(id, count, name, first) {
    const options = Array.from({ length: count }, (_, i) => element("option", { value: i }, name(i)));
    const made = element("select", { id }, options);
    made.value = String(first);
    // What a choice changes is said here; what a step changes, where the step is told.
    made.addEventListener("change", () => this.show(this.step, null, "polite"));
    return made;
  }

  show(step, _before, live = "off") {
    this.step = step;
    this.chosen.setAttribute("aria-live", live);
    const [chunk, lane] = [Number(this.chunk.value), Number(this.lane.value)];
    for (const [name, own] of Object.entries(this.fields)) own.hidden = !step.chooses.includes(name);
    const rows = `rows ${this.rows(lane).join(", ")} of V`;
    const words = {
      "chunk lane": `Lane ${lane} of warp ${this.warp(chunk)}: ${this.slot(this.token(chunk, lane))} of K, ${rows}.`,
      chunk: `Chunk ${chunk}: tokens ${this.tokens(chunk)}, taken by warp ${this.warp(chunk)}.`,
      lane: `Lane ${lane} of each warp: ${rows}.`,
    };
    this.chosen.textContent = words[step.chooses] ?? "";
    this.panel.replaceChildren(...this[step.show](chunk, lane));
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

  slot(token) {
    return token < this.run.seq_len ? `token ${token}` : `unused slot ${token}`;
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

  ofLanes(what, chunk, lane, values, words) {
    const label = `${what} of the lanes of warp ${this.warp(chunk)} at chunk ${chunk}`;
    return [element("p", { class: "label" }, label), this.cells(label, values, (i) => `lane ${i}`, words, lane)];
  }

  ofTokens(chunk, values, label) {
    const first = this.first(chunk);
    const own = values.slice(first, first + this.run.chunk_size);
    const name = (i) => this.slot(first + i);
    const cells = this.cells(label, own, name, (value) => shown(value));
    return [element("p", { class: "label" }, `${label} of chunk ${chunk}`), cells];
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
      ["Thread block", `${run.thread_block}, of ${run.num_thread_blocks}`],
      ["Sequence", `${run.seq_idx}, of ${run.seq_len} tokens`],
      ["Query head", run.head_idx],
      ["KV head", run.kv_head_idx],
      ["Threads", `${run.num_warps} warps of ${run.partials[0].length} lanes`],
    ];
    return [tableOf("What it works on", ["What", "Which"], rows)];
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
    const words = (own, i) => (own.length ? this.slot(this.token(chunk, i)) : "loads nothing");
    const rows = loads[lane].map((byte, j) => [this.keyVector(lane, j), `${byte} to ${byte + 15}`]);
    const table = tableOf(`Loads of lane ${lane}, 16 bytes each`, ["Vector", "Bytes of k_cache"], rows);
    return [table, ...this.ofLanes("Tokens", chunk, lane, loads, words)];
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
    const sum = exact(partials[chunk][lane]);
    const caption = `Lane ${lane}, ${this.slot(token)}: the products add up to ${sum}`;
    const table = tableOf(caption, ["Vector", "Of the key", "Of q"], rows);
    return [table, ...this.ofLanes("Sums", chunk, lane, partials[chunk], exact)];
  }

  products(chunk, lane) {
    const { partials, products, group_size: size } = this.run;
    const [first, token] = [lane - (lane % size), this.token(chunk, lane)];
    const rows = Array.from({ length: size }, (_, i) => [`lane ${first + i}`, exact(partials[chunk][first + i])]);
    rows.push(["both, afterwards", exact(products[token])]);
    const all = partials[chunk].map((_, i) => products[this.token(chunk, i)]);
    const table = tableOf(`q . k of ${this.slot(token)}`, ["Who", "Sum"], rows);
    return [table, ...this.ofLanes("Dot products", chunk, lane, all, exact)];
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
      own.length ? `row ${this.rows(i)[0]}: ${first(i)} to ${first(i) + this.run.vec_size - 1}` : "loads nothing";
    const rows = loads[lane].map((byte, i) => [`row ${this.rows(lane)[i]}`, `${byte} to ${byte + 15}`]);
    const table = tableOf(`Loads of lane ${lane}, 8 tokens each`, ["Row", "Bytes of v_cache"], rows);
    return [table, ...this.ofLanes("First row and tokens", chunk, lane, loads, words)];
  }

  sums(chunk, lane) {
    const { v, weights, accs, v_bytes: loads, seq_len: length, vec_size: size, num_warps: warps } = this.run;
    const first = this.firstOfVector(chunk, lane);
    const tokens = Array.from({ length: size }, (_, i) => first + i).filter((token) => token < length);
    const own = accs[this.warp(chunk) * loads[chunk].length + lane];
    const isRead = loads[chunk][lane].length > 0;
    const rows = this.rows(lane).map((row, i) => [
      `row ${row}`,
      isRead ? tokens.map((token) => shown(v[token][row] / 4)).join(", ") : "not loaded",
      shown(own[i]),
    ]);
    const weightsHere = tokens.map((token) => shown(weights[token]));
    const weighed = isRead
      ? `Weights of tokens ${tokens[0]} to ${tokens.at(-1)}: ${weightsHere.join(", ")}.`
      : "This vector has no used token.";
    const all = this.run.block_table.map((_, i) => i).filter((i) => i % warps === this.warp(chunk));
    const caption = `accs of lane ${lane}, after chunk${all.length > 1 ? "s" : ""} ${all.join(" and ")}`;
    return [element("p", { class: "weights" }, weighed), tableOf(caption, ["Row", "Values in this chunk", "Sum"], rows)];
  }

  rowSums(chunk, lane) {
    const { accs, in_warps: sums, v_vecs: size } = this.run;
    const warp = this.warp(chunk);
    const first = lane - (lane % size);
    const names = Array.from({ length: size }, (_, i) => `Lane ${first + i}`);
    const lanes = this.run.partials[0].length;
    const rows = this.rows(lane).map((row, i) => [
      `row ${row}`,
      ...names.map((_, j) => shown(accs[warp * lanes + first + j][i])),
      shown(sums[warp][row]),
    ]);
    return [tableOf(`Rows of warp ${warp}`, ["Row", ...names, "Both"], rows)];
  }

  // A column for each row of the lane: eight columns of sums would be too wide for a phone.
  warpSums(chunk, lane) {
    const { in_warps: sums, halves, out } = this.run;
    const rows = this.rows(lane);
    const line = (name, own) => [name, ...rows.map((row) => shown(own[row]))];
    const lines = [
      ...sums.map((own, i) => line(`warp ${i}`, own)),
      ...halves.map((own, i) => line(`warps ${i} and ${i + halves.length}`, own)),
      line("all", out),
    ];
    return [tableOf("Sums of the rows of V", ["Of", ...rows.map((row) => `row ${row}`)], lines)];
  }

  output() {
    const rows = this.inVectors(this.run.out, (numbers) => numbers.map((number) => shown(number)).join(", "));
    return [tableOf("out of this sequence and head", ["Elements", "Values"], rows)];
  }
}
