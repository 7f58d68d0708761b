"use strict";

// The blocks of a pool, the table of sequences and the requests, as they are after a step.
class PoolView {
  constructor(run) {
    this.run = run;
    this.blocks = element("ol", { class: "blocks", "aria-label": "Blocks of the pool" });
    this.tables = element("div", { class: "tables" });
    this.root = element("div", { class: "state" }, this.blocks, this.tables);
  }

  show(step, before) {
    this.blocks.replaceChildren(...step.blocks.map((block, i) => this.block(block, i, before?.blocks[i])));
    const sequences = step.tables.map(({ name, length, blocks }) => [name, length, blocks.join(", ")]);
    const requests = step.requests.map(({ name, state, tokens, computed }) => [name, state, tokens, computed ?? "–"]);
    this.tables.replaceChildren(
      sequences.length ? tableOf("Block tables", ["Sequence", "Tokens", "Blocks"], sequences) : "",
      requests.length ? tableOf("Requests", ["Request", "State", "Tokens", "Computed"], requests) : "",
    );
  }

  block({ kind, owners, words }, number, before) {
    const isShared = owners.length > 1;
    const state = kind === "used" ? `${owners.join(" and ")}${isShared ? ", shared" : ""}` : kind;
    const hasChanged = before !== undefined && JSON.stringify([kind, owners, words]) !==
      JSON.stringify([before.kind, before.owners, before.words]);
    const slots = Array.from({ length: this.run.block_size }, (_, i) =>
      element("li", { class: i < words.length ? "slot" : "slot empty" }, words[i] ?? "empty"),
    );
    return element(
      "li",
      { class: `block ${kind}${isShared ? " shared" : ""}${hasChanged ? " changed" : ""}` },
      element("span", { class: "name" }, `Block ${number}`),
      element("span", { class: "owner" }, state),
      element("span", { class: "news" }, hasChanged ? "changed" : ""),
      kind === "free" ? "" : element("ul", { class: "slots" }, slots),
    );
  }
}
